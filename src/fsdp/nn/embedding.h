// Vectors of tokens.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include "fsdp/nn/named_init.h"

namespace fsdp::nn {

class EmbeddingImpl : public torch::nn::Module, public NamedInit {
 public:
  EmbeddingImpl(int64_t vocab_size, int64_t hidden_size, double standard_deviation);
  at::Tensor forward(const at::Tensor& tokens);
  void reset_parameters() override;

  at::Tensor weight;  // [vocab_size, hidden_size]

 private:
  const double standard_deviation_;
};
TORCH_MODULE(Embedding);

}  // namespace fsdp::nn
