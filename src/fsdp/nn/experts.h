// A mixture of experts: a router sends every token to a few of many gated MLPs. No token is
// dropped.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include <span>
#include <vector>

#include "fsdp/nn/gated_mlp.h"
#include "fsdp/nn/projection.h"

namespace fsdp::nn {

struct ExpertsOptions {
  int64_t hidden_size = 0;
  int64_t intermediate_size = 0;  // of each expert
  int64_t num_experts = 0;
  int64_t num_chosen = 2;   // per token
  int64_t shared_size = 0;  // of the expert that every token passes; 0: none
  double standard_deviation = 0.02;
};

// What the load-balancing loss needs of one layer, [experts] each, fp32.
struct RouterLoad {
  at::Tensor mean_probability;  // over the tokens
  at::Tensor share;             // tokens of this expert / all tokens; no gradient
};

struct RoutedTokens {
  at::Tensor output;
  RouterLoad load;
};

// As in Mixtral: w2(silu(w1(x)) * w3(x)).
class ExpertImpl : public torch::nn::Module {
 public:
  explicit ExpertImpl(const ExpertsOptions& options);
  at::Tensor forward(const at::Tensor& x);

 private:
  Projection w1_, w2_, w3_;
};
TORCH_MODULE(Expert);

class ExpertsImpl : public torch::nn::Module {
 public:
  explicit ExpertsImpl(const ExpertsOptions& options);
  // [batch, sequence, hidden_size]. Reads the number of tokens per expert from the device: one
  // wait.
  RoutedTokens forward(const at::Tensor& x);

 private:
  const ExpertsOptions options_;
  Projection gate_;
  std::vector<Expert> experts_;
  GatedMlp shared_expert_{nullptr};
};
TORCH_MODULE(Experts);

// Small when all experts have the same load; num_chosen when they have. The mean over layers comes
// before the product, as in the `transformers` package's load_balancing_loss_func.
at::Tensor load_balancing_loss(std::span<const RouterLoad> layers);

}  // namespace fsdp::nn
