// The short convolution in front of recurrent mixers, with the window that decoding needs.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include <cstdint>
#include <string>
#include <vector>

#include "fsdp/nn/layers/named_init.h"
#include "fsdp/nn/layers/tensor_ranks.h"

namespace fsdp::nn {

// Convolves each channel over the current and the previous positions. The channels are sections one
// after the other; the ranks of a tp group have an equal part of each.
class CausalConvImpl : public torch::nn::Module, public NamedInit, public TokenParallelLayer {
 public:
  CausalConvImpl(std::vector<int64_t> section_sizes, int64_t kernel_size, bool with_bias);
  // [batch, sequence, channels]. `window`, if not null, holds the inputs before x (undefined:
  // zeros), and becomes the inputs that the next call needs.
  at::Tensor forward(const at::Tensor& x, at::Tensor* window);
  void reset_parameters() override;
  TpPlacement tp_placement(const std::string& parameter) const override;

  at::Tensor weight;  // [channels, 1, kernel_size]
  at::Tensor bias;    // [channels], or undefined

 private:
  const std::vector<int64_t> section_sizes_;
};
TORCH_MODULE(CausalConv);

}  // namespace fsdp::nn
