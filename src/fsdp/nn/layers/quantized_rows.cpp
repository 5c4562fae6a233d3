#include "fsdp/nn/layers/quantized_rows.h"

#include <ATen/ATen.h>
#include <ATen/BlasBackend.h>
#include <ATen/Parallel.h>

#include <algorithm>
#include <bit>
#include <optional>

#include "fsdp/base/block_scale.h"
#include "fsdp/base/check.h"
#include "fsdp/base/integer.h"
#include "fsdp/nn/kernels/kernel_calls.h"
#include "fsdp/nn/kernels/layer_kernels.h"

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
  return fp8_factor(std::bit_cast<float>(most), kLeastAmax);
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

at::Tensor all_columns(const std::vector<MultipliedColumns>& beside) {
  std::vector<at::Tensor> parts;
  for (const MultipliedColumns& part : beside)
    parts.push_back(multiplied(part.numbers, part.multipliers));
  return at::cat(parts, 1);
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

// A matrix's place among those side by side.
CodesMemory memory_from(const QuantizedRows& rows, int64_t column) {
  CodesMemory memory = memory_of(rows);
  if (memory.codes == nullptr) return memory;
  memory.codes += column;
  if (rows.block == ScaleBlock::kPiece) memory.scales += column / kScalePiece * rows.codes.size(0);
  return memory;
}

// A form without codes is not wanted.
void quantize(const std::vector<MultipliedColumns>& beside, const TwoForms& to,
              const at::Tensor& row_multipliers, ScaleBlock block) {
  std::vector<MultipliedColumns> dense;
  for (const MultipliedColumns& part : beside) {
    FSDP_ASSERT(part.numbers.size(1) % kCodeMultiple == 0, part.numbers.size(1), " columns");
    dense.push_back({dense_packs(part.numbers), dense_multipliers(part.multipliers)});
  }
  const at::Tensor by_row = dense_multipliers(row_multipliers);
  std::vector<QuantizeMemory> memory;
  int64_t columns = 0;
  for (size_t i = 0; i < dense.size(); ++i) {
    const at::Tensor& numbers = dense[i].numbers;
    memory.push_back(
        {.dtype = dtype_of(numbers.scalar_type()),
         .block = block,
         .rows = numbers.size(0),
         .columns = numbers.size(1),
         .numbers = numbers.const_data_ptr(),
         .by_rows = memory_from(to.by_rows, columns),
         .by_rows_stride = to.by_rows.codes.defined() ? to.by_rows.codes.size(1) : 0,
         .column_multipliers = pointer_to(dense[i].multipliers),
         .by_columns = to.by_columns.empty() ? CodesMemory{} : memory_of(to.by_columns[i]),
         .row_multipliers = pointer_to(by_row)});
    columns += numbers.size(1);
  }
  const at::Tensor& first = dense.front().numbers;
  const at::Tensor amaxes =
      at::empty({num_amaxes(block, first.size(0), columns)}, first.options().dtype(at::kInt));
  const OnDeviceOf device(first);
  quantize_on_device(memory, static_cast<uint32_t*>(amaxes.mutable_data_ptr()), device.stream());
}

QuantizedRows empty_by_rows(const std::vector<MultipliedColumns>& beside, ScaleBlock block) {
  const at::Tensor& first = beside.front().numbers;
  int64_t columns = 0;
  for (const MultipliedColumns& part : beside) columns += part.numbers.size(1);
  return empty_rows(first, block, first.size(0), columns, columns);
}

QuantizedRows empty_by_columns(const at::Tensor& numbers, ScaleBlock block) {
  return empty_rows(numbers, block, numbers.size(1), numbers.size(0),
                    round_up(numbers.size(0), kCodeMultiple));
}

void transpose_on_device(const at::Tensor& codes, const at::Tensor& to, int64_t first_row) {
  const at::Tensor dense = dense_packs(codes);
  const OnDeviceOf device(dense);
  transpose_bytes_on_device({.rows = codes.size(0),
                             .columns = codes.size(1),
                             .from = bytes_of(dense),
                             .to = bytes_of(to) + first_row,
                             .to_stride = to.size(1)},
                            device.stream());
}

}  // namespace

QuantizedRows quantize_rows(const std::vector<MultipliedColumns>& beside, ScaleBlock block) {
  QuantizedRows result = empty_by_rows(beside, block);
  if (result.codes.is_cuda())
    quantize(beside, {result, {}}, {}, block);
  else
    quantize_on_host(all_columns(beside), result);
  return result;
}

QuantizedRows quantize_rows(const at::Tensor& numbers, ScaleBlock block,
                            const at::Tensor& column_multipliers) {
  return quantize_rows({{numbers, column_multipliers}}, block);
}

QuantizedRows quantize_columns(const at::Tensor& numbers, ScaleBlock block,
                               const at::Tensor& row_multipliers) {
  QuantizedRows result = empty_by_columns(numbers, block);
  if (numbers.is_cuda())
    quantize({{numbers, {}}}, {{}, {result}}, row_multipliers, block);
  else
    quantize_on_host(multiplied(numbers.t(), row_multipliers), result);
  return result;
}

TwoForms quantize_two_forms(const std::vector<MultipliedColumns>& beside, ScaleBlock block,
                            const at::Tensor& row_multipliers) {
  if (!beside.front().numbers.is_cuda()) {
    TwoForms result{quantize_rows(beside, block), {}};
    for (const MultipliedColumns& part : beside)
      result.by_columns.push_back(quantize_columns(part.numbers, block, row_multipliers));
    return result;
  }
  TwoForms result{empty_by_rows(beside, block), {}};
  for (const MultipliedColumns& part : beside)
    result.by_columns.push_back(empty_by_columns(part.numbers, block));
  if (block == ScaleBlock::kMatrix) result.by_columns.front().scales = result.by_rows.scales;
  quantize(beside, result, row_multipliers, block);
  return result;
}

at::Tensor transposed_codes(at::TensorList below) {
  const int64_t columns = below.front().size(1);
  int64_t rows = 0;
  for (const at::Tensor& codes : below) rows += codes.size(0);
  at::Tensor result = at::empty({columns, round_up(rows, kCodeMultiple)}, below.front().options());
  at::Tensor bytes = result.view(at::kByte);
  int64_t first = 0;
  for (const at::Tensor& codes : below) {
    if (codes.is_cuda())
      transpose_on_device(codes, result, first);
    else
      bytes.narrow(1, first, codes.size(0)).copy_(codes.view(at::kByte).t());
    first += codes.size(0);
  }
  if (!result.is_cuda()) bytes.narrow(1, rows, bytes.size(1) - rows).zero_();
  return result;
}

at::Tensor transposed_codes(const at::Tensor& codes) {
  return transposed_codes(at::TensorList(codes));
}

// --- products ------------------------------------------------------------------------------------

namespace {

using at::blas::ScalingType;

constexpr int kHopper = 9;  // the only generation that multiplies pieces with fp32 scales

bool is_in_pieces(const QuantizedRows& rows) {
  return rows.block == ScaleBlock::kPiece || rows.block == ScaleBlock::kSquare;
}

// --- on a CPU ------------------------------------------------------------------------------------

// [rows, 1]: of the numbers in a column of pieces.
at::Tensor piece_scales(const QuantizedRows& rows, int64_t piece) {
  const at::Tensor scales = rows.scales.narrow(1, piece, 1);
  if (rows.block == ScaleBlock::kPiece) return scales;
  return scales.repeat_interleave(kScalePiece, 0).narrow(0, 0, rows.codes.size(0));
}

at::Tensor piece_codes(const QuantizedRows& rows, int64_t first, int64_t count) {
  return rows.codes.narrow(1, first, count).to(at::kFloat);
}

at::Tensor scaled_sums(const at::Tensor& sums, const at::Tensor& a, const at::Tensor& b) {
  at::Tensor result = sums;
  if (a.defined()) result = result * a;
  if (b.defined()) result = result * b.t();
  return result;
}

// The sums of codes are scaled piece by piece.
at::Tensor product_on_host(const QuantizedRows& a, const QuantizedRows& b) {
  const int64_t columns = a.codes.size(1);
  if (!is_in_pieces(a))
    return scaled_sums(piece_codes(a, 0, columns).mm(piece_codes(b, 0, columns).t()), a.scales,
                       b.scales);
  at::Tensor sum = at::zeros({a.codes.size(0), b.codes.size(0)}, at::kFloat);
  for (int64_t first = 0; first < columns; first += kScalePiece) {
    const int64_t count = std::min(kScalePiece, columns - first);
    const int64_t piece = first / kScalePiece;
    sum += scaled_sums(piece_codes(a, first, count).mm(piece_codes(b, first, count).t()),
                       piece_scales(a, piece), piece_scales(b, piece));
  }
  return sum;
}

// --- on a device ---------------------------------------------------------------------------------

// cuBLAS reads a scale for each row.
at::Tensor given_scales(const QuantizedRows& rows) {
  if (rows.scales.defined()) return dense_packs(rows.scales);
  FSDP_ASSERT(rows.block == ScaleBlock::kRow);
  return at::ones({rows.codes.size(0), 1}, rows.codes.options().dtype(at::kFloat));
}

// cuBLAS reads the squares' scales in columns of a multiple of 4.
at::Tensor padded_scales(const QuantizedRows& rows) {
  if (rows.block != ScaleBlock::kSquare) return rows.scales;
  const int64_t across = rows.scales.size(1);
  return at::constant_pad_nd(rows.scales, {0, round_up(across, 4) - across}).t();
}

int64_t number_of(ScaleBlock block) {
  return static_cast<int64_t>(block == ScaleBlock::kPiece ? ScalingType::BlockWise1x128
                                                          : ScalingType::BlockWise128x128);
}

// Sums of pieces are exact by themselves: the scales of every piece end the device's own sums.
void multiply_pieces(at::Tensor to, const CodeProduct& p, const std::optional<at::Tensor>& bias) {
  constexpr auto kAsIs = static_cast<int64_t>(at::blas::SwizzleType::NO_SWIZZLE);
  const at::Tensor a_scales = padded_scales(p.a);
  const at::Tensor b_scales = padded_scales(p.b);
  at::_scaled_mm_v2_out(to, dense_packs(p.a.codes), dense_packs(p.b.codes).t(), {a_scales},
                        {number_of(p.a.block)}, {kAsIs}, {b_scales}, {number_of(p.b.block)},
                        {kAsIs}, bias, to.scalar_type(), {}, /*use_fast_accum=*/false);
}

void multiply_on_device(at::Tensor to, const CodeProduct& p) {
  // cuBLAS adds a bias before it rounds, but to narrow numbers alone.
  const bool adds_bias = p.bias.defined() && to.scalar_type() != at::kFloat;
  const auto bias = adds_bias ? std::optional(p.bias) : std::nullopt;
  if (is_in_pieces(p.a))
    multiply_pieces(to, p, bias);
  else
    at::_scaled_mm_out(to, dense_packs(p.a.codes), dense_packs(p.b.codes).t(), given_scales(p.a),
                       given_scales(p.b).t(), bias, std::nullopt, to.scalar_type(),
                       p.sums == CodeSums::kFast);
  if (p.bias.defined() && !adds_bias) to.add_(p.bias);
}

}  // namespace

void multiply_codes(const at::Tensor& to, const CodeProduct& product) {
  FSDP_ASSERT(product.a.codes.size(1) == product.b.codes.size(1));
  if (to.is_cuda()) {
    multiply_on_device(to, product);
    return;
  }
  const at::Tensor sums = product_on_host(product.a, product.b);
  to.copy_(product.bias.defined() ? sums + product.bias.to(at::kFloat) : sums);
}

bool multiplies_codes(const at::Tensor& parameter, ScaleBlock block) {
  if (!parameter.is_cuda()) return true;
  if (!has_kernels(parameter)) return false;
  const int generation = device_generation(parameter.device().index());
  return block == ScaleBlock::kPiece ? generation == kHopper : generation >= kHopper;
}

}  // namespace fsdp::nn
