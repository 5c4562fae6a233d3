#include "fsdp/shard/group/quantized_weights.h"

#include <ATen/ATen.h>

#include <utility>

#include "fsdp/base/check.h"
#include "fsdp/base/device_stream.h"

namespace fsdp {

namespace {

void* stream_of(c10::Device device) { return current_stream(device).native_handle(); }

std::vector<Communicator*> axes_of_shards(const GroupSetting& setting) {
  std::vector<Communicator*> axes;
  const auto add = [&](Placement placement, const MeshAxis& axis) {
    if (placement == Placement::kShard && axis.size() > 1) axes.push_back(&axis.reduce());
  };
  add(setting.strategy.optimizer.inner, *setting.grid.inner);
  add(setting.strategy.optimizer.outer, *setting.grid.outer);
  return axes;
}

at::Tensor largest_of(const at::Tensor& history) { return history.amax(0); }

uint32_t* bits_in(const at::Tensor& amaxes) {
  return reinterpret_cast<uint32_t*>(amaxes.mutable_data_ptr<int32_t>());
}

}  // namespace

QuantizedWeights::QuantizedWeights(const FlatLayout& layout, const GroupTypes& types,
                                   const GroupSetting& setting, const MainWeights& main_weights,
                                   const FlatBuffer& codes)
    : recipe_(row_of(types.recipe)),
      options_(setting.quantization),
      device_(setting.device),
      shard_axes_(axes_of_shards(setting)) {
  int64_t num_scales = 0;
  for (const std::vector<int64_t>& shape : layout.request().shapes) {
    Matrix& matrix = matrices_.emplace_back(
        Matrix{shape[0], shape[1], shared_scales(types.recipe, shape[0], shape[1]), num_scales});
    num_scales += padded_count(matrix.scales);
  }
  slab_ = Slab(setting.memory.weight, num_scales * shared_scale_bytes(options_.scaling),
               layout.request().align_bytes);
  int64_t at = 0;
  const auto take = [&](int64_t numel, at::ScalarType dtype) {
    const at::Tensor numbers =
        tensor_over(numel == 0 ? nullptr : slab_.at(at), numel, dtype, device_);
    at += numel * 4;
    return numbers.zero_();
  };
  amaxes_ = take(num_scales, at::kInt);
  factors_ = take(num_scales, at::kFloat);
  scales_ = take(num_scales, at::kFloat);
  if (options_.scaling == WeightScaling::kDelayed)
    history_ = take((1 + kAmaxHistory) * num_scales, at::kInt).view({1 + kAmaxHistory, num_scales});
  counts_ = at::zeros({3}, at::device(device_).dtype(at::kLong));
  if (recipe_.scale_bytes == 1) {
    block_layout_.emplace(layout.in_blocks_of(recipe_.scale_columns));
    block_scales_.emplace(*block_layout_,
                          FlatBufferSpec{.placed = setting.strategy.parameter,
                                         .rank = setting.rank,
                                         .dtype = at::kByte,
                                         .device = device_},
                          &setting.memory.weight);
    block_scales_->allocate();
  }
  find_parts(layout, main_weights, codes);
}

void QuantizedWeights::find_parts(const FlatLayout& layout, const MainWeights& main_weights,
                                  const FlatBuffer& codes) {
  const int64_t codes_per_byte = 8 / recipe_.code_bits;
  const auto in_blocks = [](FlatRange range, int64_t numel) {
    return FlatRange{range.begin / numel, range.end / numel};
  };
  for (const MainWeightPiece& piece : main_weights.pieces())
    for (size_t i = 0; i < matrices_.size(); ++i) {
      const FlatRange whole = layout.tensor_range(static_cast<int64_t>(i));
      const FlatRange flat = intersect(piece.flat, whole);
      if (flat.empty()) continue;
      FSDP_ASSERT(piece.weight.scalar_type() == at::kFloat && !piece.main.defined());
      const float* values = piece.weight.const_data_ptr<float>() + (flat.begin - piece.flat.begin);
      const MatrixPart part{.values = values,
                            .range = {flat.begin - whole.begin, flat.end - whole.begin},
                            .rows = matrices_[i].rows,
                            .columns = matrices_[i].columns};
      parts_.push_back({i, part, flat, codes.at(in_blocks(flat, codes_per_byte)),
                        has_block_scales()
                            ? block_scales_->at(in_blocks(flat, recipe_.scale_columns))
                            : at::Tensor()});
    }
}

void QuantizedWeights::measure() {
  if (amaxes_.numel() == 0) return;
  amaxes_.zero_();
  for (const Part& part : parts_) {
    const Matrix& matrix = matrices_[part.matrix];
    uint32_t* amaxes = bits_in(amaxes_) + matrix.first_scale;
    if (device_.is_cpu())
      amax_on_host(part.values, matrix.scales, amaxes);
    else
      amax_on_device(part.values, matrix.scales, amaxes, stream_of(device_));
  }
}

Work QuantizedWeights::start_combining(const Tag& tag, const Work& after) const {
  Work last = after;
  if (amaxes_.numel() == 0) return last;
  // As whole numbers, which order magnitudes as fp32 does, and NaN above all.
  for (Communicator* axis : shard_axes_)
    last = axis->all_reduce(amaxes_, {.op = ReduceOp::kMax}, tag, last);
  return last;
}

void QuantizedWeights::make_factors(const at::Tensor& amaxes) {
  if (amaxes.numel() == 0) return;
  float* factors = factors_.mutable_data_ptr<float>();
  float* scales = scales_.mutable_data_ptr<float>();
  if (device_.is_cpu())
    factors_on_host(recipe_.recipe, bits_in(amaxes), amaxes.numel(), factors, scales);
  else
    factors_on_device(recipe_.recipe, bits_in(amaxes), amaxes.numel(), factors, scales,
                      stream_of(device_));
}

void QuantizedWeights::cast() {
  make_factors(casts_before_combining() ? largest_of(history_.narrow(0, 0, kAmaxHistory))
                                        : amaxes_);
  cast_parts();
}

void QuantizedWeights::cast_parts() {
  int64_t numel = 0;
  auto* counts = reinterpret_cast<QuantizeCounts*>(counts_.mutable_data_ptr<int64_t>());
  for (const Part& part : parts_) {
    const float* factors = factors_.numel() == 0 ? nullptr
                                                 : factors_.const_data_ptr<float>() +
                                                       matrices_[part.matrix].first_scale;
    const QuantizedPart into{
        .codes = static_cast<uint8_t*>(part.codes.mutable_data_ptr()),
        .block_scales = part.block_scales.defined()
                            ? static_cast<uint8_t*>(part.block_scales.mutable_data_ptr())
                            : nullptr,
        .counts = counts};
    if (device_.is_cpu())
      quantize_on_host(part.values, recipe_.recipe, factors, into);
    else
      quantize_on_device(part.values, recipe_.recipe, factors, into, stream_of(device_));
    numel += part.flat.numel();
  }
  counts_.select(0, 2).add_(numel);
}

// Moved within the device, so that a recorded step does it, too.
void QuantizedWeights::remember() {
  history_.narrow(0, 1, kAmaxHistory).copy_(history_.narrow(0, 0, kAmaxHistory).clone());
  history_.select(0, 0).copy_(amaxes_);
}

void QuantizedWeights::quantize(const Tag& tag, After after) {
  measure();
  if (after == After::kUpdate && casts_before_combining()) cast();
  start_combining(tag, {}).wait();
  if (!history_.defined()) return cast();
  if (after == After::kUpdate) return remember();
  for (Matrix& matrix : matrices_) {
    if (std::exchange(matrix.has_given_history, false)) continue;
    const at::Tensor history = history_columns(matrix);
    history.zero_();
    history.narrow(0, 0, 2).copy_(
        amaxes_.narrow(0, matrix.first_scale, matrix.scales.count).expand({2, -1}));
  }
  make_factors(largest_of(history_.narrow(0, 1, kAmaxHistory)));
  cast_parts();
}

QuantizedWeight QuantizedWeights::weight(int64_t index, const at::Tensor& codes,
                                         const at::Tensor& block_scales) const {
  const Matrix& matrix = matrices_[static_cast<size_t>(index)];
  const SharedScales& shared = matrix.scales;
  QuantizedWeight result{.recipe = recipe_.recipe,
                         .codes = codes.view({matrix.rows, matrix.columns * recipe_.code_bits / 8}),
                         .scales = {},
                         .matrix_scale = {},
                         .weight_gradient = options_.weight_gradient};
  if (recipe_.code_bits == 8) result.codes = result.codes.view(at::kFloat8_e4m3fn);
  const at::Tensor own = scales_.narrow(0, matrix.first_scale, shared.count);
  if (recipe_.scale_bytes == 4) {
    result.scales = own.view({-1, shared.per_row});
  } else {
    result.scales = block_scales.view({matrix.rows, matrix.columns / recipe_.scale_columns});
    if (recipe_.has_matrix_scale) result.matrix_scale = own;
  }
  return result;
}

at::Tensor QuantizedWeights::take_counts() {
  const at::Tensor counts = counts_.clone();
  counts_.zero_();
  return counts;
}

at::Tensor QuantizedWeights::history_columns(const Matrix& matrix) const {
  return history_.narrow(1, matrix.first_scale, matrix.scales.count);
}

at::Tensor QuantizedWeights::history_of(int64_t index) const {
  return history_columns(matrices_[static_cast<size_t>(index)]).contiguous().view(at::kFloat);
}

void QuantizedWeights::set_history(int64_t index, const at::Tensor& amaxes) {
  Matrix& matrix = matrices_[static_cast<size_t>(index)];
  history_columns(matrix).copy_(amaxes.contiguous().view(at::kInt));
  matrix.has_given_history = true;
}

}  // namespace fsdp
