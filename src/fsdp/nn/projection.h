// A linear layer whose first values depend on its name.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include <vector>

#include "fsdp/nn/named_init.h"

namespace fsdp::nn {

struct ProjectionOptions {
  int64_t in = 0;
  int64_t out = 0;
  bool bias = false;
  // Of the weight's first values; the bias begins with 0.
  double standard_deviation = 0.02;
};

// x * weight^T + bias, computed like fsdp::nn::Linear: weight gradients go straight to where they
// are reduced from.
class ProjectionImpl : public torch::nn::Module, public NamedInit {
 public:
  explicit ProjectionImpl(const ProjectionOptions& options);
  at::Tensor forward(const at::Tensor& input);
  void reset_parameters() override;

  at::Tensor weight;  // [out, in]
  at::Tensor bias;    // [out], or undefined

 private:
  const double standard_deviation_;
};
TORCH_MODULE(Projection);

// Several of one input.
std::vector<at::Tensor> project(const at::Tensor& input, const std::vector<Projection>& layers);

}  // namespace fsdp::nn
