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

class RmsNormImpl : public torch::nn::Module, public NamedInit {
 public:
  RmsNormImpl(int64_t size, double eps);
  at::Tensor forward(const at::Tensor& input);
  void reset_parameters() override;

  at::Tensor weight;

 private:
  const double eps_;
};
TORCH_MODULE(RmsNorm);

}  // namespace fsdp::nn
