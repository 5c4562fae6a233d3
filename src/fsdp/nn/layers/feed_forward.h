// MLPs, and what they compute between their matrices.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include <cstdint>
#include <vector>

#include "fsdp/nn/layers/matrix_layers.h"

namespace fsdp::nn {

// silu(gate) * up; keeps only its two arguments for the backward.
at::Tensor gated_silu(const at::Tensor& gate, const at::Tensor& up);

// Rows begin with gate and end with up: [n, 2 * size] -> [n, size].
at::Tensor gated_silu(const at::Tensor& gate_and_up);

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
