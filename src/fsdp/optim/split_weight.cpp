#include "fsdp/optim/split_weight.h"

namespace fsdp {

void join_weights(const void* weight, const int16_t* remainder, float* joined, int64_t numel) {
  const auto* upper = static_cast<const uint16_t*>(weight);
  for (int64_t i = 0; i < numel; ++i)
    joined[i] = join_weight({.upper = upper[i], .remainder = remainder[i]});
}

void split_weights(const float* joined, void* weight, int16_t* remainder, int64_t numel) {
  auto* upper = static_cast<uint16_t*>(weight);
  for (int64_t i = 0; i < numel; ++i) {
    const SplitWeight split = split_weight(joined[i]);
    upper[i] = split.upper;
    remainder[i] = split.remainder;
  }
}

}  // namespace fsdp
