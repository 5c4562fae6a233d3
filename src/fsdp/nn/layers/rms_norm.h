// Root-mean-square normalisation in fp32: x / sqrt(mean(x^2) + eps) * weight.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include "fsdp/nn/layers/named_init.h"
#include "fsdp/nn/layers/tensor_ranks.h"

namespace fsdp::nn {

// Over the last dimension, or over each of `num_groups` equal parts of it; the weight has its size.
// The result has the input's type.
at::Tensor rms_norm(const at::Tensor& input, const at::Tensor& weight, double eps,
                    int64_t num_groups = 1);

// The beginning of a residual layer: the value that goes around it, and the normed one that goes
// in. Both come from one function, so that a device adds up their gradients where it computes them.
struct NormedBranch {
  at::Tensor around;
  at::Tensor normed;
};

class RmsNormImpl : public torch::nn::Module, public NamedInit, public TokenParallelLayer {
 public:
  RmsNormImpl(int64_t size, double eps);
  at::Tensor forward(const at::Tensor& input);
  NormedBranch branch(const at::Tensor& x);
  // Of x + added.
  NormedBranch branch(const at::Tensor& x, const at::Tensor& added);
  void reset_parameters() override;

  at::Tensor weight;

 private:
  const double eps_;
};
TORCH_MODULE(RmsNorm);

}  // namespace fsdp::nn
