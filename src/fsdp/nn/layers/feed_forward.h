// The second half of a layer, after the attention: a gated MLP, or a router that sends every token
// to a few of many gated MLPs.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include <span>
#include <vector>

#include "fsdp/nn/layers/matrix_layers.h"

namespace fsdp::nn {

// --- gated MLP -----------------------------------------------------------------------------------

// The gated MLP: down(silu(gate(x)) * up(x)).

// silu(gate) * up; keeps only its two arguments for the backward.
at::Tensor gated_silu(const at::Tensor& gate, const at::Tensor& up);

struct GatedMlpOptions {
  int64_t hidden_size = 0;
  int64_t intermediate_size = 0;
  bool bias = false;
  double standard_deviation = 0.02;
};

class GatedMlpImpl : public torch::nn::Module {
 public:
  explicit GatedMlpImpl(const GatedMlpOptions& options);
  at::Tensor forward(const at::Tensor& x);

 private:
  Projection gate_proj_, up_proj_, down_proj_;
};
TORCH_MODULE(GatedMlp);

// --- experts -------------------------------------------------------------------------------------

// A mixture of experts: a router sends every token to a few of many gated MLPs. No token is
// dropped.

struct ExpertsOptions {
  int64_t hidden_size = 0;
  int64_t intermediate_size = 0;  // of each expert
  int64_t num_experts = 0;
  int64_t num_chosen = 2;   // per token
  int64_t shared_size = 0;  // of the expert that every token passes; 0: none
  double standard_deviation = 0.02;
};

// A layer's input to the load-balancing loss, [experts] each, fp32.
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
  // [batch, sequence, hidden_size]. Waits once for the device, to read the number of tokens per
  // expert.
  RoutedTokens forward(const at::Tensor& x);

 private:
  const ExpertsOptions options_;
  Projection gate_;
  std::vector<Expert> experts_;
  GatedMlp shared_expert_{nullptr};
};
TORCH_MODULE(Experts);

// Smallest when all experts have the same load: then it is num_chosen. Averages over layers before
// the product, as the `transformers` package's load_balancing_loss_func does.
at::Tensor load_balancing_loss(std::span<const RouterLoad> layers);

}  // namespace fsdp::nn
