// The short convolution in front of recurrent mixers, with the window that decoding needs.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include "fsdp/nn/layers/named_init.h"

namespace fsdp::nn {

// Convolves each channel over the current and the previous positions.
class CausalConvImpl : public torch::nn::Module, public NamedInit {
 public:
  CausalConvImpl(int64_t num_channels, int64_t kernel_size, bool with_bias);
  // [batch, sequence, channels]. `window`, if not null, holds the inputs before x (undefined:
  // zeros), and becomes the inputs that the next call needs.
  at::Tensor forward(const at::Tensor& x, at::Tensor* window);
  void reset_parameters() override;

  at::Tensor weight;  // [channels, 1, kernel_size]
  at::Tensor bias;    // [channels], or undefined
};
TORCH_MODULE(CausalConv);

}  // namespace fsdp::nn
