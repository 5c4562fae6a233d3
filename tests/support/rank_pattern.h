// Test data that every rank can compute for every other rank.
#pragma once

#include <ATen/ATen.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <tuple>

namespace fsdp::testing {

// Values between -1 and 1 that depend on (rank, seed) alone; written without libtorch's generators,
// so that they are the same in every version of it.
inline at::Tensor rank_pattern(int rank, int64_t numel, at::ScalarType dtype, uint64_t seed = 0) {
  at::Tensor values = at::empty({numel}, at::kDouble);
  double* data = values.mutable_data_ptr<double>();
  uint64_t state =
      (seed + 1) * 0x9E3779B97F4A7C15ull + static_cast<uint64_t>(rank) * 0xD1B54A32D192ED03ull;
  for (int64_t i = 0; i < numel; ++i) {
    state = state * 6364136223846793005ull + 1442695040888963407ull;
    const auto top = static_cast<int64_t>(state >> 40);  // 24 bits
    data[i] = static_cast<double>(top) / double(1 << 23) - 1.0;
  }
  if (at::isIntegralType(dtype, /*includeBool=*/false)) return (values.abs() * 100).to(dtype);
  return values.to(dtype);
}

// To the nearest value of `dtype`, ties to even, in one step: libtorch goes from fp64 to narrow
// types through fp32, which rounds twice. For magnitudes that neither overflow nor, in bf16,
// underflow.
inline at::Tensor rounded_once(const at::Tensor& values, at::ScalarType dtype) {
  const bool narrow = dtype == at::kBFloat16 || dtype == at::kHalf;
  if (values.scalar_type() != at::kDouble || !narrow) return values.to(dtype);
  const int bits = dtype == at::kHalf ? 11 : 8;
  const at::Tensor exponent = std::get<1>(at::frexp(values)).to(at::kDouble);
  at::Tensor ulp = (exponent - bits).exp2();
  if (dtype == at::kHalf) ulp = ulp.clamp_min(std::ldexp(1.0, -24));  // subnormal
  return ((values / ulp).round() * ulp).to(dtype);
}

// Equal to the last bit; NaNs of one pattern are equal too.
inline bool same_bytes(const at::Tensor& a, const at::Tensor& b) {
  const at::Tensor x = a.contiguous().cpu();
  const at::Tensor y = b.contiguous().cpu();
  return x.scalar_type() == y.scalar_type() && x.numel() == y.numel() &&
         (x.nbytes() == 0 || std::memcmp(x.const_data_ptr(), y.const_data_ptr(), x.nbytes()) == 0);
}

}  // namespace fsdp::testing
