// The numbers that a tensor's bytes stand for, whatever type they are stored in.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "fsdp/base/dtype.h"

namespace fsdp {

// Every number as a double: exact, but for integers beyond 2^53.
void read_values(DType dtype, std::span<const std::byte> bytes, std::span<double> values);

// Floating-point numbers in another type (fp64, fp32, fp16 or bf16), rounded once: to nearest, ties
// to even. Returns how many finite numbers became Inf because the type cannot hold them.
int64_t convert_values(DType from, std::span<const std::byte> bytes, DType to,
                       std::span<std::byte> into);

}  // namespace fsdp
