// A mixture of experts: a router sends every token to a few of many MLPs.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include <string>

#include "fsdp/nn/layers/feed_forward.h"
#include "fsdp/nn/layers/router.h"
#include "fsdp/shard/matrix_module.h"
#include "fsdp/shard/parallel_module.h"
#include "fsdp/shard/quantized_weight.h"

namespace fsdp::nn {

struct ExpertsOptions {
  RouterOptions router;           // num_experts = 0: no experts
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
};

// The MLPs of all experts, matrix after matrix in two parameters, so that one product computes all
// experts. On a mesh with an `ep` axis: those of this rank's experts.
class ExpertBankImpl : public torch::nn::Module,
                       public NamedInit,
                       public ExpertModule,
                       public QuantizableModule,
                       public MatrixModule {
 public:
  explicit ExpertBankImpl(const ExpertsOptions& options);
  struct Results {
    at::Tensor output;   // like the tokens
    at::Tensor dropped;  // ExpertRoute::dropped()
  };
  // tokens: [tokens, latent_size or hidden_size]; weight: of their choices
  Results forward(const at::Tensor& tokens, const SortedChoices& choices, const at::Tensor& weight);
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
  at::Tensor into_;       // [experts * intermediate_size, size], gated: twice, gate, up, gate, ...
  at::Tensor down_proj_;  // [experts * size, intermediate_size]
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

}  // namespace fsdp::nn
