// Products of matrices of fp8 codes.
#pragma once

#include <ATen/core/Tensor.h>

#include "fsdp/nn/layers/quantized_rows.h"

namespace fsdp::nn {

// How a device sums products of codes. (A CPU sums them in fp32.)
enum class CodeSums : uint8_t {
  kFast,  // in its matrix units alone, which keep about 14 bits: for outputs
  // Moved to fp32 sums every few products. For gradients: errors of a step's sums stay in the
  // weights, and gradients of tokens cancel. (TransformerEngine's and torchao's defaults, too.)
  kExact,
};

// to[i, j] = sum over k of a[i, k] * b[j, k], plus bias[j]: summed in fp32 and
// rounded once, to the type of `to`: fp32, bf16 or fp16. Both have as many codes in a row, a
// multiple of 16 on a device. Blocks: both kMatrix; both kRow; a kPiece with b kPiece or kSquare.
struct CodeProduct {
  const QuantizedRows& a;
  const QuantizedRows& b;
  at::Tensor bias = {};  // undefined: none
  CodeSums sums = CodeSums::kExact;
};
void multiply_codes(const at::Tensor& to, const CodeProduct& product);

// Whether the device of a layer's parameter has such products, for numbers of its type; a CPU has.
bool multiplies_codes(const at::Tensor& parameter, ScaleBlock block);

}  // namespace fsdp::nn
