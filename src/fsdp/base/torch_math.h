// The math libraries inside libtorch, which ranks that are threads share.
#pragma once

#include <string>

namespace fsdp {

// Makes those libraries choose their code for this processor now, in one thread. Any thread may
// call it; all calls but the first do nothing. World calls it before any rank computes.
//
// Note [The first call of MKL's vector functions]
// MKL's cos, exp, ... ask mkl_vml_serv_cpu_detect() which code to run. At its first call that
// function stores the processor's number as another table counts it, looks up the right one and
// stores that, without a lock. A thread that comes in between runs code for a processor that is
// not there: other roundings, once, in one rank or in one of OpenMP's threads. On AVX-512 machines
// this gave 2 % of the runs of two rank threads other weights from the first step on.
void choose_torch_math();

// For people: "MKL 2024.2, oneDNN 3.7.1, vectors of AVX512".
std::string torch_math_text();

}  // namespace fsdp
