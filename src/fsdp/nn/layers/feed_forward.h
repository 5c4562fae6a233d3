// The gated MLP: down(silu(gate(x)) * up(x)).
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include "fsdp/nn/layers/matrix_layers.h"

namespace fsdp::nn {

// silu(gate) * up; keeps only its two arguments for the backward.
at::Tensor gated_silu(const at::Tensor& gate, const at::Tensor& up);

// The same of rows that begin with gate and end with up: [n, 2 * size] -> [n, size].
at::Tensor gated_silu(const at::Tensor& gate_and_up);

struct GatedMlpOptions {
  int64_t hidden_size = 0;
  int64_t intermediate_size = 0;
  bool bias = false;
  double standard_deviation = 0.02;
  // The ranks of a tp group share it out: each has a part of the intermediate size. Else each has
  // all of it.
  bool is_cut = false;
};

class GatedMlpImpl : public torch::nn::Module, public TokenParallelLayer {
 public:
  explicit GatedMlpImpl(const GatedMlpOptions& options);
  at::Tensor forward(const at::Tensor& own);

 private:
  const bool is_cut_;
  Projection gate_proj_, up_proj_, down_proj_;
};
TORCH_MODULE(GatedMlp);

}  // namespace fsdp::nn
