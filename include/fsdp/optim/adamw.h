// Adam with decoupled weight decay for sharded models.
#pragma once

#include <c10/core/ScalarType.h>

#include <vector>

#include "fsdp/optim/optimizer.h"

namespace fsdp {

struct AdamWOptions {
  // The learning rate; Optimizer::set_learning_rate() changes it between steps.
  double lr = 1e-3;

  // How much of the first and second moment a step keeps.
  double beta1 = 0.9;
  double beta2 = 0.999;

  // Added to the root of the second moment, so that nothing is divided by 0.
  double eps = 1e-8;

  // A step takes lr * weight_decay of a weight away, for any gradient.
  double weight_decay = 0.01;

  // Whether vectors and scalars (biases, norms) do not decay.
  bool decay_spares_vectors = true;

  // Decay and rate by parameter names; the first rule that matches counts.
  std::vector<ParameterRule> rules = {};

  // Type of the moments: fp32, bf16, fp16, Float8_e4m3fn or Float8_e5m2 (docs/optimizer.md gives
  // the cost of each). fp16 and fp8 add a scale per 128 elements.
  at::ScalarType first_moment = at::kFloat;
  at::ScalarType second_moment = at::kFloat;

  // Clipping, skipping, loss scale, and when updates run.
  StepOptions step = {};
};

// Keeps "exp_avg" and "exp_avg_sq" of every element. Within one ulp per step of torch::optim::AdamW
// in fp32.
class AdamW final : public Optimizer {
 public:
  explicit AdamW(const Sharded& sharded, const AdamWOptions& options = {});
};

}  // namespace fsdp
