// A mixture of experts: a router sends every token to a few of many gated MLPs.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include "fsdp/nn/layers/feed_forward.h"
#include "fsdp/nn/layers/router.h"
#include "fsdp/shard/parallel_module.h"

namespace fsdp::nn {

struct ExpertsOptions {
  RouterOptions router;           // num_experts = 0: no experts
  int64_t intermediate_size = 0;  // of each expert
  int64_t shared_size = 0;        // of the expert that every token passes; 0: none
  double capacity_factor = 0.0;   // ExpertRanks
};

// The MLPs of all experts, down(silu(gate(x)) * up(x)), matrix after matrix in two parameters, so
// that one product computes all experts. On a mesh with an `ep` axis: those of this rank's experts.
class ExpertBankImpl : public torch::nn::Module, public NamedInit, public ExpertModule {
 public:
  explicit ExpertBankImpl(const ExpertsOptions& options);
  struct Results {
    at::Tensor by_choice;  // [tokens, num_chosen, hidden_size]
    at::Tensor dropped;    // ExpertRoute::dropped()
  };
  // tokens: [tokens, hidden_size]
  Results forward(const at::Tensor& tokens, const SortedChoices& choices);
  void reset_parameters() override;
  void join(const MeshAxis& ep) override;

 private:
  const ExpertsOptions options_;
  const MeshAxis* ep_ = nullptr;
  at::Tensor gate_up_proj_;  // [experts * 2 * intermediate_size, hidden_size]: gate, up, gate, ...
  at::Tensor down_proj_;     // [experts * hidden_size, intermediate_size]
};
TORCH_MODULE(ExpertBank);

struct RoutedTokens {
  at::Tensor output;
  RouterLoad load;
};

class ExpertsImpl : public torch::nn::Module {
 public:
  explicit ExpertsImpl(const ExpertsOptions& options);
  // [batch, sequence, hidden_size]
  RoutedTokens forward(const at::Tensor& x);

 private:
  Router gate_;
  ExpertBank experts_;
  GatedMlp shared_expert_{nullptr};
};
TORCH_MODULE(Experts);

}  // namespace fsdp::nn
