// Stochastic gradient descent with momentum for sharded models.
#pragma once

#include <c10/core/ScalarType.h>

#include "fsdp/optim/optimizer.h"

namespace fsdp {

struct SGDOptions {
  // The learning rate; Optimizer::set_learning_rate() changes it between steps.
  double lr = 1e-2;

  // How much of the last step's direction a step keeps. 0: none, and no memory for it.
  double momentum = 0.0;

  // Look ahead along the momentum; needs one.
  bool nesterov = false;

  // weight_decay * weight is added to the gradient, as torch::optim::SGD does.
  double weight_decay = 0.0;

  // Whether vectors and scalars (biases, norms) are spared from it.
  bool decay_spares_vectors = true;

  // Decay and rate by parameter names; the first rule that matches counts.
  std::vector<ParameterRule> rules = {};

  // What the momentum is kept in (AdamWOptions::first_moment).
  at::ScalarType momentum_dtype = at::kFloat;

  // Clipping, skipping, loss scale, and when updates run.
  StepOptions step = {};
};

// Keeps "momentum_buffer" of every element where there is a momentum.
class SGD final : public Optimizer {
 public:
  explicit SGD(const Sharded& sharded, const SGDOptions& options = {});
};

}  // namespace fsdp
