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

// The gradient of a layer's output, in the forms that its products need.
class OutputGradient {
 public:
  // gradient: [tokens, out]. Quantised when it is needed, in one pass if both are wanted.
  OutputGradient(const at::Tensor& gradient, const at::Tensor& weight);
  void quantize_for_both(const TurnedInput& input);

  // sum + dX, or dX if the sum is undefined. Each part is rounded to the gradient's type.
  at::Tensor added_to_input_gradient(const at::Tensor& sum);
  // dW, or undefined after writing it to its slab.
  at::Tensor weight_gradient(const TurnedInput& input);

 private:
  const at::Tensor gradient_;
  const at::Tensor weight_;
  QuantizedRows by_rows_;
  QuantizedRows by_columns_;
};

}  // namespace fsdp::nn
