// Stochastic gradient descent with momentum for sharded models.
#pragma once

#include <c10/core/ScalarType.h>

#include <vector>

#include "fsdp/optim/optimizer.h"

namespace fsdp {

struct SGDOptions {
  // The learning rate; Optimizer::set_learning_rate() changes it between steps.
  double lr = 1e-2;

  // The fraction of the last step's direction that a step keeps. 0: none, and no memory for it.
  double momentum = 0.0;

  // Looks ahead along the momentum, which must not be 0.
  bool nesterov = false;

  // weight_decay * weight is added to the gradient, as torch::optim::SGD does.
  double weight_decay = 0.0;

  // Whether vectors and scalars (biases, norms) do not decay.
  bool decay_spares_vectors = true;

  // Decay and rate by parameter names; the first rule that matches counts.
  std::vector<ParameterRule> rules = {};

  // Type of the momentum (see AdamWOptions::first_moment).
  at::ScalarType momentum_dtype = at::kFloat;

  // Clipping, skipping, loss scale, and when updates run.
  StepOptions step = {};
};

// Keeps "momentum_buffer" of every element if there is a momentum.
class SGD final : public Optimizer {
 public:
  explicit SGD(const Sharded& sharded, const SGDOptions& options = {});
};

}  // namespace fsdp
