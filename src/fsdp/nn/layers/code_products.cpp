#include "fsdp/nn/layers/code_products.h"

#include <ATen/ATen.h>
#include <ATen/BlasBackend.h>

#include <algorithm>
#include <optional>

#include "fsdp/base/check.h"
#include "fsdp/base/integer.h"
#include "fsdp/nn/kernels/kernel_calls.h"
#include "fsdp/nn/kernels/layer_kernels.h"

namespace fsdp::nn {

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
