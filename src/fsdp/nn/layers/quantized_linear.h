// Linear layers of which at least one weight is gathered as codes and scales.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

namespace fsdp::nn {

// input * weight^T + bias for each weight; biases: one for each, undefined where there is none.
std::vector<at::Tensor> quantized_linear(const at::Tensor& input,
                                         const std::vector<at::Tensor>& weights,
                                         const std::vector<at::Tensor>& biases);

}  // namespace fsdp::nn
