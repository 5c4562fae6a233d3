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
// codes of weight and input are only transposed, never made a second time.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>

#include "fsdp/nn/layers/quantized_rows.h"
#include "fsdp/shard/layer_weights.h"

namespace fsdp::nn {

// --- numbers of a weight -------------------------------------------------------------------------

// Codes times scales in fp32, rounded once to the type. A copy of the whole matrix.
at::Tensor dequantized(const QuantizedWeight& weight, at::ScalarType type);

// The parameter itself, or what its codes say, in its type.
at::Tensor numbers_of(const at::Tensor& parameter);

// --- where the gradient of a weight goes: the slab that is reduced, or autograd ------------------

enum class ProductUse : uint8_t { kStored, kAdded };

// target = transposed * inputs, or target += that; transposed: [rows, n], inputs: [n, columns]. The
// target has the inputs' type, or fp32 for narrow ones: then nothing is rounded before it is
// summed.
void write_product(at::Tensor target, const at::Tensor& transposed, const at::Tensor& inputs,
                   ProductUse use);

// The layer writes all rows of the gradient, each once.
class WeightGradient {
 public:
  explicit WeightGradient(const at::Tensor& weight);

  // gradient[first ...] = transposed * inputs; transposed: [rows of the matrix, n], inputs: [n,
  // columns of the matrix]; zeros if n is 0.
  void write_rows(int64_t first, const at::Tensor& transposed, const at::Tensor& inputs);

  // All rows at once: what `product` writes to the tensor that it is given, of fp32 or of the
  // weight's type.
  void write(const std::function<void(const at::Tensor& to)>& product);

  // The whole gradient at once: values * factor, computed in the wider of their types; factor: [1].
  void write(const at::Tensor& values, const at::Tensor& factor);

  // Undefined if the gradient is in its slab.
  const at::Tensor& for_autograd() const { return own_; }

 private:
  at::Tensor own_;
  DirectGradient target_;
};

// --- products ------------------------------------------------------------------------------------

bool has_quantized(at::TensorList weights);

// [..., size] to [rows, size].
inline at::Tensor rows_of(const at::Tensor& tensor) {
  return tensor.reshape({-1, tensor.size(-1)});
}

// The forms of an input that products read; those that nobody reads may be undefined.
struct LayerInput {
  at::Tensor numbers;  // [..., in]
  QuantizedRows codes;
};

int64_t tokens_of(const LayerInput& input);

// Quantised once for all weights. Those that are quantised have one recipe.
LayerInput layer_input(const at::Tensor& numbers, at::TensorList weights);

// Whether every weight reads codes of tokens that depend on the token alone: tokens can be
// quantised before they travel.
bool reads_codes_of_rows(at::TensorList weights, int64_t num_tokens);

// The part of it that gradients of those weights need which have some: codes, at half the bytes, or
// numbers.
LayerInput kept_input(const LayerInput& input, at::TensorList weights);
// Like kept_input(), but the input is rebuilt in the backward, so both forms are kept.
LayerInput input_of_gradients(const at::Tensor& numbers, at::TensorList weights);

// X * W^T + bias (may be undefined): [..., out] like the numbers, [tokens, out] of codes.
at::Tensor layer_output(const LayerInput& input, const at::Tensor& weight, const at::Tensor& bias);

// An input as gradients of weights read it, made once for several weights of one recipe.
struct TransposedInput {
  LayerInput input;
  QuantizedRows by_columns;  // codes may be undefined
};
TransposedInput transposed_input(const LayerInput& input, at::TensorList weights);

// The gradients of the outputs of layers with one input. Those whose scales allow it (not
// fp8-tensor) are quantised side by side: their part of dX is one product, and is rounded once.
class OutputGradients {
 public:
  // gradients: [tokens, out] of each weight. Quantised when they are needed.
  OutputGradients(const std::vector<at::Tensor>& gradients, at::TensorList weights);
  // For dX and the dW of all weights, in one pass.
  void quantize_for_both(const TransposedInput& input);

  // dX: parts are rounded to the gradients' type, and added.
  at::Tensor input_gradient();
  // dW of a weight, or undefined after writing it to its slab.
  at::Tensor weight_gradient(size_t weight, const TransposedInput& input);

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
