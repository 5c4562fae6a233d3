// The Mamba-2 mixer, with the parameters and names of Nemotron-H.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include "fsdp/nn/architecture.h"
#include "fsdp/nn/decoding_cache.h"
#include "fsdp/nn/named_init.h"
#include "fsdp/nn/projection.h"
#include "fsdp/nn/rms_norm.h"

namespace fsdp::nn {

// Each channel convolved with the positions before it.
class CausalConvImpl : public torch::nn::Module, public NamedInit {
 public:
  CausalConvImpl(int64_t num_channels, int64_t kernel_size, bool with_bias);
  // [batch, sequence, channels]. `window`, where it is not null, has the inputs before x, zeros if
  // undefined, and gets those that the next ones need.
  at::Tensor forward(const at::Tensor& x, at::Tensor* window);
  void reset_parameters() override;

  at::Tensor weight;  // [channels, 1, kernel_size]
  at::Tensor bias;    // [channels], or undefined
};
TORCH_MODULE(CausalConv);

class Mamba2Impl : public torch::nn::Module, public NamedInit {
 public:
  explicit Mamba2Impl(const NemotronHConfig& config);
  // [batch, sequence, hidden_size]. With a cache, x follows what that holds, and is added to it.
  at::Tensor forward(const at::Tensor& x, LayerCache* cache);
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
