// Activations and gradients as fp8 codes and scales, which products of matrices read.
#pragma once

#include <ATen/core/Tensor.h>

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
QuantizedRows quantize_rows(const at::Tensor& numbers, ScaleBlock block,
                            const at::Tensor& column_multipliers = {});

// Of the transposed matrix: [columns, rows and zeros up to a multiple of 16], so that a device can
// multiply it whatever the number of rows is.
QuantizedRows quantize_columns(const at::Tensor& numbers, ScaleBlock block,
                               const at::Tensor& row_multipliers = {});

// Both at once: a device reads the numbers less often.
struct TwoForms {
  QuantizedRows by_rows;
  QuantizedRows by_columns;
};
TwoForms quantize_two_forms(const at::Tensor& numbers, ScaleBlock block,
                            const at::Tensor& column_multipliers = {},
                            const at::Tensor& row_multipliers = {});

// [rows, columns] to [columns, rows and zeros up to a multiple of 16].
at::Tensor transposed_codes(const at::Tensor& codes);

}  // namespace fsdp::nn
