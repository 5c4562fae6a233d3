// The three products of a linear layer whose weight may be quantised: with codes where the recipe
// and the shapes have such products, else with the weight's numbers.
//
// X: input, [tokens, in]; W: weight, [out, in]; Y = X * W^T: output. s: scales.
//
//            fp8-tensor           fp8-row                        fp8-block (pieces along the sum)
//   Y        q(X) * W^T           q(X) * W^T                     q(X) * W^T
//   dX       q(dY) * W            q(dY o s(W)) * codes of W      q(dY) * W
//   dW       q(dY)^T * q(X)       q((dY o s(X))^T) * codes of X  q(dY^T) * q(X^T)
//
// Scales of rows become multipliers of the gradient where the sum runs over those rows, so that
// neither the weight nor the input is quantised a second time: each has one form, and its codes are
// only transposed.
#pragma once

#include <ATen/core/Tensor.h>

#include "fsdp/nn/layers/quantized_rows.h"

namespace fsdp::nn {

bool has_quantized(at::TensorList weights);

// What products read of an input; what nobody reads may be undefined.
struct LayerInput {
  at::Tensor numbers;  // [tokens, in]
  QuantizedRows codes;
};

// Quantised once for all weights. Those that are quantised have one recipe.
LayerInput layer_input(const at::Tensor& numbers, at::TensorList weights);

// Whether every weight reads codes of tokens that depend on the token alone: tokens can be
// quantised before they travel.
bool reads_codes_of_rows(at::TensorList weights, int64_t num_tokens);

// The part of it that gradients of those weights need which have some: codes, at half the bytes, or
// numbers.
LayerInput kept_input(const LayerInput& input, at::TensorList weights);
// The same of numbers that are there again in the backward, with the numbers.
LayerInput input_of_gradients(const at::Tensor& numbers, at::TensorList weights);

// X * W^T + bias (may be undefined): [tokens, out]
at::Tensor layer_output(const LayerInput& input, const at::Tensor& weight, const at::Tensor& bias);

// An input as gradients of weights read it, made once for several weights of one recipe.
struct TurnedInput {
  LayerInput input;
  QuantizedRows by_columns;  // codes may be undefined
};
TurnedInput turned_input(const LayerInput& input, at::TensorList weights);

// The gradients of the outputs of layers with one input, in the forms that their products need.
// Those whose scales allow it (not fp8-tensor) are quantised side by side, as one matrix: their
// part of dX is one product, and is rounded once.
class OutputGradients {
 public:
  // gradients: [tokens, out] of each weight. Quantised when they are needed.
  OutputGradients(const std::vector<at::Tensor>& gradients, at::TensorList weights);
  // For dX and the dW of all weights, in one pass.
  void quantize_for_both(const TurnedInput& input);

  // dX: parts are rounded to the gradients' type, and added.
  at::Tensor input_gradient();
  // dW of a weight, or undefined after writing it to its slab.
  at::Tensor weight_gradient(size_t weight, const TurnedInput& input);

 private:
  struct Layer {
    at::Tensor gradient;
    at::Tensor weight;
    QuantizedRows by_columns;
  };
  // Layers that are quantised side by side.
  struct Group {
    std::vector<size_t> layers;
    QuantizedRows by_rows;
  };
  at::Tensor gradient_by(Group& group);

  std::vector<Layer> layers_;
  std::vector<Group> groups_;
  std::vector<size_t> plain_;  // layers whose numbers are multiplied
};

}  // namespace fsdp::nn
