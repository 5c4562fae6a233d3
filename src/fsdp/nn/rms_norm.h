// Root-mean-square normalisation: x / sqrt(mean(x^2) + eps) * weight, in fp32 whatever the types.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include "fsdp/nn/named_init.h"

namespace fsdp::nn {

// Over the last dimension, or over each of so many equal parts of it; the weight has its size. The
// result has the input's type.
at::Tensor rms_norm(const at::Tensor& input, const at::Tensor& weight, double eps,
                    int64_t num_groups = 1);

// Where a residual layer begins: what goes around it, and what goes in. Both from one function, so
// that a device adds up their gradients where it computes them.
struct NormedBranch {
  at::Tensor around;
  at::Tensor normed;
};

class RmsNormImpl : public torch::nn::Module, public NamedInit {
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
