// Which experts a token goes to, with which weights, and how evenly that spreads the tokens.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include <cstdint>
#include <span>

#include "fsdp/nn/layers/expert_route.h"
#include "fsdp/nn/layers/named_init.h"
#include "fsdp/nn/layers/tensor_ranks.h"

namespace fsdp::nn {

enum class RouterScore : uint8_t {
  kSoftmax,  // Mixtral's and Qwen's: probabilities that add up to 1
  kSigmoid,  // DeepSeek-V3's: every expert by itself; computed in fp32
};

struct RouterOptions {
  int64_t hidden_size = 0;
  int64_t num_experts = 0;
  int64_t num_chosen = 2;  // per token
  RouterScore score = RouterScore::kSoftmax;
  // The experts are num_groups groups, in order; a token chooses among those of the num_open_groups
  // groups whose two best scores have the largest sums.
  int64_t num_groups = 1;
  int64_t num_open_groups = 1;
  bool normalizes = true;  // the weights of a token's choices add up to `scale`
  double scale = 1.0;
  double standard_deviation = 0.02;
};

// A layer's input to the load-balancing loss, [experts] each, fp32.
struct RouterLoad {
  at::Tensor mean_probability;  // over the tokens
  at::Tensor share;             // tokens of this expert / all tokens; no gradient
  at::Tensor dropped = {};      // one element: ExpertRoute::dropped()
};

struct RoutedChoices {
  at::Tensor weight;  // [tokens, num_chosen], of the tokens' type
  SortedChoices choices;
  RouterLoad load;
};

class RouterImpl : public torch::nn::Module, public NamedInit, public TokenParallelLayer {
 public:
  explicit RouterImpl(const RouterOptions& options);
  // [tokens, hidden_size]. Never waits for the device.
  RoutedChoices forward(const at::Tensor& tokens);
  void reset_parameters() override;

 private:
  at::Tensor among_open_groups(const at::Tensor& scores) const;

  const RouterOptions options_;
  at::Tensor weight_;  // [num_experts, hidden_size]
};
TORCH_MODULE(Router);

// Smallest when all experts have the same load: then it is num_chosen. Averages over layers before
// the product, as the `transformers` package's load_balancing_loss_func does; and over the ranks of
// a tp group, which have equally many tokens each.
at::Tensor load_balancing_loss(std::span<const RouterLoad> layers, const MeshAxis* tp = nullptr);

}  // namespace fsdp::nn
