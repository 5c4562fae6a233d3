// The hyper-parameters of the update rules that do not change from step to step or from span to
// span.
#pragma once

#include <cstdint>

namespace fsdp {

// How an updated weight becomes narrow where no wider copy of it is kept (MainWeight::kIsWeight).
enum class Rounding : uint8_t {
  kNearest,     // ties to even: updates of less than half an ulp are lost
  kStochastic,  // up or down so that the mean is right; drawn from (seed, step, group, position)
};

// Adam with decoupled weight decay.
struct AdamWRule {
  double beta1 = 0.9;
  double beta2 = 0.999;
  double eps = 1e-8;
  Rounding rounding = Rounding::kNearest;
  uint64_t seed = 0;  // of the random numbers, which narrow moments need, too
};

// Stochastic gradient descent, weight decay added to the gradient, as torch::optim::SGD.
struct SgdRule {
  double momentum = 0.0;  // 0: no momentum is kept, and the span's first.values is null
  bool nesterov = false;
  Rounding rounding = Rounding::kNearest;
  uint64_t seed = 0;
};

}  // namespace fsdp
