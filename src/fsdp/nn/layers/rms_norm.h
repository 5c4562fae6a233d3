// Root-mean-square normalisation in fp32: x / sqrt(mean(x^2) + eps) * factor.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include <cstdint>

#include "fsdp/nn/layers/named_init.h"
#include "fsdp/nn/layers/tensor_ranks.h"

namespace fsdp::nn {

// The form in which a norm's weight stores its factors.
enum class NormWeight : uint8_t {
  kFactor,
  kZeroCentred,  // factor - 1: decay pulls factors to 1, and narrow types keep small differences
};

// Over the last dimension, or over each of `num_groups` equal parts of it; the weight has its size.
// The result has the input's type.
at::Tensor rms_norm(const at::Tensor& input, const at::Tensor& weight, double eps,
                    int64_t num_groups = 1);

// The norm of rows and its gradients, without autograd: for whoever has a formula of its own.
struct NormForm {
  double eps = 0;
  double offset = 0;  // factors are this + weight
};
struct NormedRows {
  at::Tensor normed;
  at::Tensor scales;  // fp32, one per row: 1 / sqrt(mean(x^2) + eps)
};
NormedRows normed_rows(const at::Tensor& x, const at::Tensor& weight, const NormForm& form);
struct NormedRowsGradients {
  at::Tensor of_x;
  at::Tensor of_weight;
};
NormedRowsGradients normed_rows_backward(const at::Tensor& gradient, const at::Tensor& x,
                                         const at::Tensor& weight, const at::Tensor& scales,
                                         const NormForm& form);

// The beginning of a residual layer: the value that goes around it, and the normed one that goes
// in. Both come from one function, so that a device adds up their gradients where it computes them.
struct NormedBranch {
  at::Tensor around;
  at::Tensor normed;
};

class RmsNormImpl : public torch::nn::Module, public NamedInit, public TokenParallelLayer {
 public:
  // On the ranks of a tp group the weight is whole, each uses it for its tokens or heads; a layer
  // that is cut by channels says so.
  RmsNormImpl(int64_t size, double eps, NormWeight form = NormWeight::kFactor,
              TpPlacement placement = TpPartial{});
  at::Tensor forward(const at::Tensor& input);
  // The branch of x, or of x + added.
  NormedBranch branch(const at::Tensor& x, const at::Tensor& added = {});
  void reset_parameters() override;
  TpPlacement tp_placement(const std::string&) const override { return placement_; }

  at::Tensor weight;

 private:
  const double eps_;
  const TpPlacement placement_;
  const double offset_;  // of factors from the weight
};
TORCH_MODULE(RmsNorm);

}  // namespace fsdp::nn
