// Activations and gradients as fp8 codes and scales, which products of matrices read.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "fsdp/nn/kernels/quantize_kernels.h"

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

// Of matrices side by side, as of one that has all their columns. kMatrix: of one; kPiece: of
// multiples of kScalePiece columns, if there are several.
QuantizedRows quantize_rows(const std::vector<MultipliedColumns>& beside, ScaleBlock block);

// Of the transposed matrix: [columns, rows and zeros up to a multiple of 16], so that a device can
// multiply it whatever the number of rows is.
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
// Of matrices one below the other. Their rows are multiples of 16, if there are several.
at::Tensor transposed_codes(at::TensorList below);

}  // namespace fsdp::nn
