// Activations and gradients as fp8 codes and scales, and products of matrices of such codes.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "fsdp/nn/kernels/layer_kernels.h"

namespace fsdp::nn {

// A matrix whose number [i, j] is codes[i, j] times the scale of its block.
struct QuantizedRows {
  ScaleBlock block = ScaleBlock::kRow;
  at::Tensor codes;  // [rows, columns], float8_e4m3fn, dense
  // fp32. kMatrix: [1, 1]; kRow: [rows, 1]; kPiece: [rows, ceil(columns / 128)], the scales of a
  // column of pieces side by side; kSquare: [ceil(rows / 128), ceil(columns / 128)]. Undefined: all
  // are 1.
  at::Tensor scales;
};

// numbers: [rows, columns] of fp32, bf16 or fp16. A scale is that of the block's largest magnitude.
// Blocks are kMatrix, kRow or kPiece. Each number is first multiplied, in fp32, by the multiplier
// (fp32) of its column or row; undefined: 1, and always so for kMatrix.
struct MultipliedColumns {
  at::Tensor numbers;
  at::Tensor multipliers;  // of columns
};
QuantizedRows quantize_rows(const at::Tensor& numbers, ScaleBlock block,
                            const at::Tensor& column_multipliers = {});

// Matrices side by side, quantised like one that has all their columns. kMatrix: one; kPiece:
// multiples of kScalePiece columns, if there are several.
QuantizedRows quantize_rows(const std::vector<MultipliedColumns>& beside, ScaleBlock block);

// Codes of the transposed matrix: [columns, rows and zeros up to a multiple of 16], so that a
// device can multiply it whatever the number of rows is.
QuantizedRows quantize_columns(const at::Tensor& numbers, ScaleBlock block,
                               const at::Tensor& row_multipliers = {});

// Both at once: a device reads the numbers less often.
struct TwoForms {
  QuantizedRows by_rows;                  // of all matrices side by side
  std::vector<QuantizedRows> by_columns;  // of each matrix
};
TwoForms quantize_two_forms(const std::vector<MultipliedColumns>& beside, ScaleBlock block,
                            const at::Tensor& row_multipliers = {});

// [rows, columns] to [columns, rows and zeros up to a multiple of 16].
at::Tensor transposed_codes(const at::Tensor& codes);
// Matrices one below the other, transposed. Their rows are multiples of 16, if there are several.
at::Tensor transposed_codes(at::TensorList below);

// --- products ------------------------------------------------------------------------------------

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
