// A mixture of experts: a router sends every token to a few of many MLPs; and how evenly tokens
// spread over experts: what layers report of it, the loss and the biases that even it out.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "fsdp/nn/language_model.h"
#include "fsdp/nn/layers/expert_route.h"
#include "fsdp/nn/layers/feed_forward.h"
#include "fsdp/nn/layers/named_init.h"
#include "fsdp/nn/layers/tensor_ranks.h"
#include "fsdp/shard/layer_weights.h"
#include "fsdp/shard/module_roles.h"

namespace fsdp {
class Mesh;
}

namespace fsdp::nn {

// --- routers -------------------------------------------------------------------------------------

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

// --- experts -------------------------------------------------------------------------------------

struct ExpertsOptions {
  RouterOptions router;
  int64_t intermediate_size = 0;  // of each expert
  MlpKind kind = MlpKind::kGatedSilu;
  // The size of tokens between two projections that all experts share; 0: they have none.
  int64_t latent_size = 0;
  // The expert that every token passes; size 0: none.
  int64_t shared_size = 0;
  const char* shared_module = "shared_expert";
  bool is_shared_gated = false;  // by the sigmoid of one more output per token
  bool bias = false;             // of the shared expert and of the shared projections
  double capacity_factor = 0.0;  // ExpertRanks
  ExpertExchange exchange = ExpertExchange::kAuto;
};

// The matrices of the experts that this rank has, one below the other, so that one product computes
// all experts.
struct ExpertMatrices {
  at::Tensor into;  // [experts * intermediate_size, size], gated: twice, gate, up, gate, ...
  at::Tensor down;  // [experts * size, intermediate_size]
  std::function<at::Tensor(const at::Tensor& rows)> activation;
};

struct ExpertResults {
  at::Tensor output;   // like the tokens
  at::Tensor dropped;  // ExpertRoute::dropped()
};

// tokens: [tokens, size]; weight: [tokens, num_chosen], of the tokens' type. All ranks of an ep
// group call it together.
ExpertResults mixed_by_experts(const at::Tensor& tokens, const SortedChoices& choices,
                               const at::Tensor& weight, const ExpertMatrices& experts,
                               const ExpertRanks& ranks);

// The MLPs of all experts. On a mesh with an `ep` axis: those of this rank's experts.
class ExpertBankImpl : public torch::nn::Module,
                       public NamedInit,
                       public ExpertModule,
                       public QuantizableModule,
                       public MatrixModule {
 public:
  explicit ExpertBankImpl(const ExpertsOptions& options);
  // tokens: [tokens, latent_size or hidden_size]; weight: of their choices
  ExpertResults forward(const at::Tensor& tokens, const SortedChoices& choices,
                        const at::Tensor& weight);
  void reset_parameters() override;
  void join(const MeshAxis& ep) override;
  bool is_quantizable(const std::string& parameter) const override {
    const at::Tensor& weight = parameter == "down_proj" ? down_proj_ : into_;
    return fsdp::is_quantizable(weight.size(0), weight.size(1));
  }
  std::vector<int64_t> matrix_rows(const std::string& parameter) const override;

 private:
  const ExpertsOptions options_;
  const MeshAxis* ep_ = nullptr;
  int64_t agreed_tokens_ = -1;  // ExpertRanks
  at::Tensor into_;             // ExpertMatrices
  at::Tensor down_proj_;
};
TORCH_MODULE(ExpertBank);

struct RoutedTokens {
  at::Tensor output;
  RouterLoad load;
};

class ExpertsImpl : public torch::nn::Module {
 public:
  explicit ExpertsImpl(const ExpertsOptions& options);
  // [batch, sequence, hidden_size]; token_weight: as of Router.
  RoutedTokens forward(const at::Tensor& x, const at::Tensor& token_weight = {});

 private:
  at::Tensor shared_output(const at::Tensor& tokens);

  Router gate_;
  ExpertBank experts_;
  Projection to_latent_{nullptr};
  Projection from_latent_{nullptr};
  Mlp shared_expert_{nullptr};
  Projection shared_expert_gate_{nullptr};
};
TORCH_MODULE(Experts);

// --- loads ---------------------------------------------------------------------------------------

// The results of a block: the hidden state first, and with experts the tensors of RouterLoad last.
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
