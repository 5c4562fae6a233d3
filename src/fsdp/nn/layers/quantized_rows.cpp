#include "fsdp/nn/layers/quantized_rows.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include <algorithm>
#include <bit>

#include "fsdp/base/block_scale.h"
#include "fsdp/base/check.h"
#include "fsdp/base/integer.h"
#include "fsdp/nn/kernels/kernel_calls.h"

namespace fsdp::nn {

namespace {

QuantizedRows empty_rows(const at::Tensor& numbers, ScaleBlock block, int64_t rows, int64_t columns,
                         int64_t padded_columns) {
  QuantizedRows result{
      .block = block,
      .codes = at::empty({rows, padded_columns}, numbers.options().dtype(at::kFloat8_e4m3fn)),
      .scales = {}};
  const auto fp32 = numbers.options().dtype(at::kFloat);
  if (block == ScaleBlock::kMatrix) result.scales = at::empty({1, 1}, fp32);
  if (block == ScaleBlock::kRow) result.scales = at::empty({rows, 1}, fp32);
  if (block == ScaleBlock::kPiece)
    result.scales = at::empty({ceil_div(columns, kScalePiece), rows}, fp32).t();
  return result;
}

uint8_t* bytes_of(const at::Tensor& codes) { return static_cast<uint8_t*>(codes.data_ptr()); }

// --- on a CPU: the definition, by plain loops ----------------------------------------------------

float factor_of(const float* numbers, int64_t count) {
  uint32_t most = 0;
  for (int64_t i = 0; i < count; ++i) most = std::max(most, magnitude_bits(numbers[i]));
  return fp8_factor(std::bit_cast<float>(most));
}

void write_codes(const float* numbers, int64_t count, float factor, uint8_t* codes) {
  for (int64_t i = 0; i < count; ++i) codes[i] = fp8_code(numbers[i], factor);
}

// Writes behind the numbers of a row, too: zeros.
void quantize_on_host(const at::Tensor& numbers, const QuantizedRows& result) {
  const at::Tensor dense = numbers.contiguous();
  const auto* from = dense.const_data_ptr<float>();
  const int64_t columns = dense.size(1);
  const int64_t stride = result.codes.size(1);
  const bool has_one = result.block == ScaleBlock::kMatrix;
  const float one = has_one ? factor_of(from, dense.numel()) : 0.0f;
  if (has_one) result.scales.fill_(fp8_scale(one));
  const int64_t piece = result.block == ScaleBlock::kPiece ? kScalePiece : columns;
  auto* codes = bytes_of(result.codes);
  auto* scales = result.scales.mutable_data_ptr<float>();
  at::parallel_for(0, dense.size(0), 16, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      for (int64_t first = 0; first < columns; first += piece) {
        const float* at = from + row * columns + first;
        const int64_t count = std::min(piece, columns - first);
        const float factor = has_one ? one : factor_of(at, count);
        write_codes(at, count, factor, codes + row * stride + first);
        if (!has_one) scales[first / piece * dense.size(0) + row] = fp8_scale(factor);
      }
      std::fill_n(codes + row * stride + columns, stride - columns, uint8_t{0});
    }
  });
}

at::Tensor multiplied(const at::Tensor& numbers, const at::Tensor& multipliers) {
  const at::Tensor wide = numbers.to(at::kFloat);
  return multipliers.defined() ? wide * multipliers.reshape({1, -1}) : wide;
}

// --- on a device ---------------------------------------------------------------------------------

at::Tensor dense_multipliers(const at::Tensor& multipliers) {
  return multipliers.defined() ? dense_packs(multipliers) : multipliers;
}

const float* pointer_to(const at::Tensor& multipliers) {
  return multipliers.defined() ? multipliers.const_data_ptr<float>() : nullptr;
}

CodesMemory memory_of(const QuantizedRows& rows) {
  if (!rows.codes.defined()) return {};
  return {bytes_of(rows.codes), rows.scales.mutable_data_ptr<float>()};
}

void quantize(const at::Tensor& numbers, const TwoForms& to, const at::Tensor& column_multipliers,
              const at::Tensor& row_multipliers, ScaleBlock block) {
  FSDP_ASSERT(numbers.size(1) % kCodeMultiple == 0, numbers.size(1), " columns");
  const at::Tensor dense = dense_packs(numbers);
  const at::Tensor by_column = dense_multipliers(column_multipliers);
  const at::Tensor by_row = dense_multipliers(row_multipliers);
  const at::Tensor amaxes =
      at::empty({num_amaxes(block, dense.size(0), dense.size(1))}, dense.options().dtype(at::kInt));
  const OnDeviceOf device(dense);
  quantize_on_device({.dtype = dtype_of(dense.scalar_type()),
                      .block = block,
                      .rows = dense.size(0),
                      .columns = dense.size(1),
                      .numbers = dense.const_data_ptr(),
                      .by_rows = memory_of(to.by_rows),
                      .column_multipliers = pointer_to(by_column),
                      .by_columns = memory_of(to.by_columns),
                      .row_multipliers = pointer_to(by_row),
                      .amaxes = static_cast<uint32_t*>(amaxes.mutable_data_ptr())},
                     device.stream());
}

QuantizedRows empty_by_rows(const at::Tensor& numbers, ScaleBlock block) {
  return empty_rows(numbers, block, numbers.size(0), numbers.size(1), numbers.size(1));
}

QuantizedRows empty_by_columns(const at::Tensor& numbers, ScaleBlock block) {
  return empty_rows(numbers, block, numbers.size(1), numbers.size(0),
                    round_up(numbers.size(0), kCodeMultiple));
}

}  // namespace

QuantizedRows quantize_rows(const at::Tensor& numbers, ScaleBlock block,
                            const at::Tensor& column_multipliers) {
  QuantizedRows result = empty_by_rows(numbers, block);
  if (numbers.is_cuda())
    quantize(numbers, {result, {}}, column_multipliers, {}, block);
  else
    quantize_on_host(multiplied(numbers, column_multipliers), result);
  return result;
}

QuantizedRows quantize_columns(const at::Tensor& numbers, ScaleBlock block,
                               const at::Tensor& row_multipliers) {
  QuantizedRows result = empty_by_columns(numbers, block);
  if (numbers.is_cuda())
    quantize(numbers, {{}, result}, {}, row_multipliers, block);
  else
    quantize_on_host(multiplied(numbers.t(), row_multipliers), result);
  return result;
}

TwoForms quantize_two_forms(const at::Tensor& numbers, ScaleBlock block,
                            const at::Tensor& column_multipliers,
                            const at::Tensor& row_multipliers) {
  if (!numbers.is_cuda())
    return {quantize_rows(numbers, block, column_multipliers),
            quantize_columns(numbers, block, row_multipliers)};
  TwoForms result{empty_by_rows(numbers, block), empty_by_columns(numbers, block)};
  if (block == ScaleBlock::kMatrix) result.by_columns.scales = result.by_rows.scales;
  quantize(numbers, result, column_multipliers, row_multipliers, block);
  return result;
}

at::Tensor transposed_codes(const at::Tensor& codes) {
  const int64_t rows = codes.size(0);
  const int64_t columns = codes.size(1);
  at::Tensor result = at::empty({columns, round_up(rows, kCodeMultiple)}, codes.options());
  if (codes.is_cuda()) {
    const at::Tensor dense = dense_packs(codes);
    const OnDeviceOf device(dense);
    transpose_bytes_on_device(
        {.rows = rows, .columns = columns, .from = bytes_of(dense), .to = bytes_of(result)},
        device.stream());
    return result;
  }
  at::Tensor bytes = result.view(at::kByte);
  bytes.narrow(1, 0, rows).copy_(codes.view(at::kByte).t());
  bytes.narrow(1, rows, bytes.size(1) - rows).zero_();
  return result;
}

}  // namespace fsdp::nn
