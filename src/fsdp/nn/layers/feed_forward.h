// MLPs, and what they compute between their matrices.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include <cstdint>
#include <utility>
#include <vector>

#include "fsdp/nn/kernels/layer_kernels.h"
#include "fsdp/nn/layers/matrix_layers.h"

namespace fsdp::nn {

// silu(gate) * up; keeps only its two arguments for the backward.
at::Tensor gated_silu(const at::Tensor& gate, const at::Tensor& up);

// Rows begin with gate and end with up: [n, 2 * size] -> [n, size].
at::Tensor gated_silu(const at::Tensor& gate_and_up);

// The arguments of activation(gate) * up: two tensors, or rows that begin with gate and end with
// up.
struct GatedInput {
  // Makes them dense where a kernel computes. `second`: undefined if `first` has rows of both.
  GatedInput(GatedActivation activation, const at::Tensor& first, const at::Tensor& second);

  GatedActivation activation;
  at::Tensor first;
  at::Tensor second;
};

// The function and its gradients, of `first` and `second`, without autograd: for whoever has a
// formula of its own.
at::Tensor gated(const GatedInput& input);
std::pair<at::Tensor, at::Tensor> gated_backward(const GatedInput& input,
                                                 const at::Tensor& gradient);

// relu(x)^2
at::Tensor squared_relu(const at::Tensor& x);

enum class MlpKind : uint8_t {
  kGatedSilu,    // down(silu(gate(x)) * up(x))
  kSquaredRelu,  // down(relu(up(x))^2)
};

struct MlpOptions {
  int64_t hidden_size = 0;
  int64_t intermediate_size = 0;
  MlpKind kind = MlpKind::kGatedSilu;
  bool bias = false;
  double standard_deviation = 0.02;
  // The ranks of a tp group share it out: each has a part of the intermediate size. Else each has
  // all of it.
  bool is_cut = false;
};

class MlpImpl : public torch::nn::Module, public TokenParallelLayer {
 public:
  explicit MlpImpl(const MlpOptions& options);
  at::Tensor forward(const at::Tensor& own);

 private:
  const bool is_cut_;
  std::vector<Projection> into_;  // gate and up, or up alone
  Projection down_proj_{nullptr};
};
TORCH_MODULE(Mlp);

}  // namespace fsdp::nn
