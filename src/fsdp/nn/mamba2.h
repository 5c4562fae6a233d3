// The Mamba-2 mixer, with the parameters and names of Nemotron-H.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include "fsdp/nn/architecture.h"
#include "fsdp/nn/named_init.h"
#include "fsdp/nn/projection.h"
#include "fsdp/nn/rms_norm.h"

namespace fsdp::nn {

// Each channel convolved with the positions before it.
class CausalConvImpl : public torch::nn::Module, public NamedInit {
 public:
  CausalConvImpl(int64_t num_channels, int64_t kernel_size, bool with_bias);
  at::Tensor forward(const at::Tensor& x);  // [batch, sequence, channels]
  void reset_parameters() override;

  at::Tensor weight;  // [channels, 1, kernel_size]
  at::Tensor bias;    // [channels], or undefined
};
TORCH_MODULE(CausalConv);

class Mamba2Impl : public torch::nn::Module, public NamedInit {
 public:
  explicit Mamba2Impl(const NemotronHConfig& config);
  at::Tensor forward(const at::Tensor& x);  // [batch, sequence, hidden_size]
  void reset_parameters() override;

 private:
  const NemotronHConfig config_;
  at::Tensor a_log_, d_, dt_bias_;  // [heads]
  Projection in_proj_;
  CausalConv conv1d_;
  RmsNorm norm_;
  Projection out_proj_;
};
TORCH_MODULE(Mamba2);

}  // namespace fsdp::nn
