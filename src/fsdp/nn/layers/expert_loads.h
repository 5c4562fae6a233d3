// How evenly tokens spread over experts: what layers report of it, the loss and the biases that
// even it out.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <cstdint>
#include <span>
#include <vector>

#include "fsdp/nn/language_model.h"
#include "fsdp/nn/layers/router.h"

namespace fsdp {
class Mesh;
}

namespace fsdp::nn {

// What a unit of a language model returns: the hidden state first, and with experts the tensors of
// RouterLoad last.
using BlockOutput = std::vector<at::Tensor>;

// Smallest when all experts have the same load: then it is num_chosen. Averages over layers before
// the product, as the `transformers` package's load_balancing_loss_func does; and over the ranks of
// a tp group, which have equally many tokens each.
at::Tensor load_balancing_loss(std::span<const RouterLoad> layers, const MeshAxis* tp = nullptr);

// `capacity_factor`: ExpertRanks; loads say which share was dropped if it is above 0.
void append_load(RouterLoad load, double capacity_factor, BlockOutput& output);

// The loads of a model's layers, of one forward.
class ExpertLoads {
 public:
  explicit ExpertLoads(double capacity_factor) : counts_dropped_(capacity_factor > 0) {}

  // The one that was appended, if any.
  void take(const BlockOutput& output);

  // The balance, with a weight in the total, and the share of dropped choices.
  void add_to(ModelLoss& loss, double weight, const MeshAxis* tp) const;

 private:
  const bool counts_dropped_;
  std::vector<RouterLoad> loads_;
};

// Updates the biases of all routers that have them, by the choices of all ranks since the last
// call. Every rank calls it after a step.
void even_out_loads(const torch::nn::Module& model, const Mesh& mesh);

}  // namespace fsdp::nn
