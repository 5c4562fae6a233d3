#include <algorithm>
#include <array>
#include <cstddef>
#include <numeric>

#include "fsdp/base/check.h"
#include "fsdp/base/compiler.h"
#include "fsdp/base/exact_sum.h"
#include "fsdp/base/narrow_float.h"
#include "fsdp/optim/kernels/update_kernels.h"

namespace fsdp {

namespace {

// In fp64, in which no square of an fp32 number overflows; the conversion hides behind the memory.
// Several sums fill vectors and hide the latency of an addition.
template <typename Narrow>
double squared_sum(const void* values, int64_t numel) {
  constexpr int64_t kLanes = 16;
  const auto* from = static_cast<const typename Narrow::Code*>(values);
  std::array<double, kLanes> sums{};
  int64_t begin = 0;
  for (; begin + kLanes <= numel; begin += kLanes) {
    FSDP_INDEPENDENT_ITERATIONS
    for (int64_t lane = 0; lane < kLanes; ++lane) {
      const double value = Narrow::widened(from[begin + lane]);
      sums[static_cast<size_t>(lane)] += value * value;
    }
  }
  for (; begin < numel; ++begin) {
    const double value = Narrow::widened(from[begin]);
    sums[0] += value * value;
  }
  return std::accumulate(sums.begin(), sums.end(), 0.0);
}

}  // namespace

double squared_sum_on_cpu(const void* values, DType dtype, int64_t numel) {
  if (dtype == DType::kFloat32) return squared_sum<Fp32>(values, numel);
  if (dtype == DType::kBFloat16) return squared_sum<Bf16>(values, numel);
  if (dtype == DType::kFloat16) return squared_sum<Fp16>(values, numel);
  FSDP_CHECK(false, "a squared sum of ", name_of(dtype), " was asked for: use fp32, bf16 or fp16");
  return 0.0;
}

void add_exact_squares_on_cpu(const void* values, DType dtype, int64_t numel, int64_t* digits) {
  const auto* bytes = static_cast<const std::byte*>(values);
  for (int64_t begin = 0; begin < numel; begin += kExactBlock)
    ExactSum::place(squared_sum_on_cpu(bytes + begin * element_bytes(dtype), dtype,
                                       std::min(kExactBlock, numel - begin)),
                    [digits](int digit, int64_t amount) { digits[digit] += amount; });
}

}  // namespace fsdp
