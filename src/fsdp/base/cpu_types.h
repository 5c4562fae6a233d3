// Which narrow types libtorch multiplies quickly on this machine's CPU.
#pragma once

#include "fsdp/base/dtype.h"

namespace fsdp {

struct CpuTypes {
  bool has_bfloat16 = false;
  bool has_float16 = false;
};

// Asked once. Machines that are neither x86-64 nor aarch64 have none.
CpuTypes this_cpu();

// Whether products of this type are about as fast there as fp32 ones.
bool is_quick_on(const CpuTypes& cpu, DType dtype);

}  // namespace fsdp
