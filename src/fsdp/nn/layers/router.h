// Which experts a token goes to, with which weights, and how evenly that spreads the tokens.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include <cstdint>

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
  // DeepSeek-V3's way to even out the load: experts are chosen by score plus a bias of their own,
  // which even_out_loads() changes by bias_rate after a step. Weights are made of scores alone.
  bool has_bias = false;
  double bias_rate = 0.001;
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
  // [tokens, hidden_size]. Never waits for the device. `token_weight`, [tokens], is of each in the
  // means of the load; undefined: 1.
  RoutedChoices forward(const at::Tensor& tokens, const at::Tensor& token_weight = {});
  void reset_parameters() override;

  // The choices of each expert since the last update, of all forwards that have a backward; fp64.
  // Undefined before the first one, and without biases.
  at::Tensor num_chosen() const { return num_chosen_; }
  // Raises the biases of experts that were chosen less often than the mean, and lowers the others'.
  // `num_chosen` is the sum over all ranks. Begins to count again.
  void update_bias(const at::Tensor& num_chosen);

 private:
  at::Tensor among_open_groups(const at::Tensor& scores) const;
  void count(const SortedChoices& choices, const at::Tensor& token_weight);

  const RouterOptions options_;
  at::Tensor weight_;  // [num_experts, hidden_size]
  at::Tensor bias_;    // [num_experts], fp32 whatever the weight's type
  at::Tensor num_chosen_;
};
TORCH_MODULE(Router);

}  // namespace fsdp::nn
