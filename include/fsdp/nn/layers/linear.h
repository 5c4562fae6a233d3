// A linear layer that writes its weight gradient straight into the slab that is reduced.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/pimpl.h>

#include <cstdint>
#include <string>
#include <vector>

#include "fsdp/shard/layer_weights.h"
#include "fsdp/shard/module_roles.h"

namespace fsdp::nn {

// torch::nn::Linear with the same parameters and initialisation, and the result of at::linear, as
// in Python (torch::nn::Linear rounds once more in narrow types if the input is not a matrix). In a
// sharded model its backward computes the weight gradient into the unit's gradient slab, without a
// full-size gradient and without a copy. Where that is impossible it works like torch::nn::Linear.
//
// A quantised weight is multiplied by quantised inputs (docs/fp8.md).
class LinearImpl : public torch::nn::LinearImpl, public QuantizableModule, public MatrixModule {
 public:
  using torch::nn::LinearImpl::LinearImpl;
  at::Tensor forward(const at::Tensor& input);
  bool is_quantizable(const std::string& parameter) const override {
    return parameter == "weight" && fsdp::is_quantizable(weight.size(0), weight.size(1));
  }
  std::vector<int64_t> matrix_rows(const std::string& parameter) const override {
    return parameter == "weight" ? std::vector{weight.size(0)} : std::vector<int64_t>();
  }
};
TORCH_MODULE(Linear);

// input * weight^T + bias (bias may be undefined), with the same backward.
at::Tensor linear(const at::Tensor& input, const at::Tensor& weight, const at::Tensor& bias);

// Several weights multiply one input. On a device the backward's matrix products add up the
// input's gradient as they go. For quantised weights the input is quantised once.
std::vector<at::Tensor> linear(const at::Tensor& input, const std::vector<at::Tensor>& weights,
                               const std::vector<at::Tensor>& biases);

}  // namespace fsdp::nn
