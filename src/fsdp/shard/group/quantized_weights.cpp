#include "fsdp/shard/group/quantized_weights.h"

#include <ATen/ATen.h>
#include <c10/core/TensorImpl.h>

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

uint32_t* bits_in(const at::Tensor& amaxes) {
  return reinterpret_cast<uint32_t*>(amaxes.mutable_data_ptr<int32_t>());
}

struct QuantizedTag final : c10::BackendMeta {
  explicit QuantizedTag(std::function<QuantizedWeight()> source) : current(std::move(source)) {}
  const std::function<QuantizedWeight()> current;
};

}  // namespace

QuantizedWeights::QuantizedWeights(const FlatLayout& layout, const GroupTypes& types,
                                   const GroupSetting& setting, const GroupPaths& paths,
                                   const MainWeights& main_weights, const FlatBuffer& codes)
    : layout_(layout),
      recipe_(row_of(types.recipe)),
      options_(setting.quantization),
      device_(setting.device),
      shard_axes_(axes_of_shards(setting)) {
  int64_t num_scales = 0;
  for (const std::vector<int64_t>& shape : layout.request().shapes) {
    Matrix& matrix = matrices_.emplace_back(
        Matrix{shape[0], shape[1], shared_scales(types.recipe, shape[0], shape[1]), num_scales});
    num_scales += padded_count(matrix.scales);
  }
  slab_ = Slab(setting.memory.weight, num_scales * kSharedScaleBytes, layout.request().align_bytes);
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
  counts_ = at::zeros({3}, at::device(device_).dtype(at::kLong));
  if (recipe_.scale_bytes == 1) {
    block_layout_.emplace(layout.in_blocks_of(recipe_.scale_columns));
    const auto buffer = [&](PlacementPair placed, SlabAllocator* allocator) {
      return FlatBuffer(
          *block_layout_,
          {.placed = placed, .rank = setting.rank, .dtype = at::kByte, .device = device_},
          allocator);
    };
    const auto along = [&](const PlacementPath& path) {
      return Redistribution(*block_layout_, setting.grid, setting.rank, path);
    };
    block_scales_.emplace(BlockScales{buffer(setting.strategy.parameter, &setting.memory.weight),
                                      buffer({}, nullptr), along(paths.refresh),
                                      along(paths.unshard)});
    block_scales_->own.allocate();
  }
  cache_.resize(matrices_.size());
  find_parts(main_weights, codes);
}

void QuantizedWeights::find_parts(const MainWeights& main_weights, const FlatBuffer& codes) {
  const auto in_blocks = [](FlatRange range, int64_t numel) {
    return FlatRange{range.begin / numel, range.end / numel};
  };
  for (const MainWeightPiece& piece : main_weights.pieces())
    for (size_t i = 0; i < matrices_.size(); ++i) {
      const FlatRange whole = layout_.tensor_range(static_cast<int64_t>(i));
      const FlatRange flat = intersect(piece.flat, whole);
      if (flat.empty()) continue;
      FSDP_ASSERT(piece.weight.scalar_type() == at::kFloat && !piece.main.defined());
      const float* values = piece.weight.const_data_ptr<float>() + (flat.begin - piece.flat.begin);
      const MatrixPart part{.values = values,
                            .range = {flat.begin - whole.begin, flat.end - whole.begin},
                            .rows = matrices_[i].rows,
                            .columns = matrices_[i].columns};
      parts_.push_back({i, part, flat, codes.at(flat),
                        block_scales_
                            ? block_scales_->own.at(in_blocks(flat, recipe_.scale_columns))
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
  // Combined as whole numbers, which order magnitudes as fp32 does, and NaN above all.
  for (Communicator* axis : shard_axes_)
    last = axis->all_reduce(amaxes_, {.op = ReduceOp::kMax}, tag, last);
  return last;
}

void QuantizedWeights::make_factors() {
  if (amaxes_.numel() == 0) return;
  float* factors = factors_.mutable_data_ptr<float>();
  float* scales = scales_.mutable_data_ptr<float>();
  if (device_.is_cpu())
    factors_on_host(bits_in(amaxes_), amaxes_.numel(), factors, scales);
  else
    factors_on_device(bits_in(amaxes_), amaxes_.numel(), factors, scales, stream_of(device_));
}

void QuantizedWeights::cast() {
  make_factors();
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

void QuantizedWeights::forget_values() {
  parts_.clear();
  has_values_ = false;
}

void QuantizedWeights::quantize(const Tag& tag) {
  if (!has_values_) return;
  measure();
  start_combining(tag, {}).wait();
  cast();
}

Work QuantizedWeights::start_refresh(const Tag& tag, const Work& after) {
  if (!block_scales_) return after;
  return block_scales_->refresh.start(block_scales_->own, block_scales_->own, tag, after);
}

Work QuantizedWeights::start_unshard(void* room, const Tag& tag, const Work& after) {
  if (!block_scales_) return after;
  block_scales_->whole.lie_at(room);
  return block_scales_->unshard.start(block_scales_->own, block_scales_->whole, tag, after);
}

const QuantizedWeight& QuantizedWeights::weight(int64_t index, const FlatBuffer& codes) {
  CachedWeight& cached = cache_[static_cast<size_t>(index)];
  if (const void* address = codes.local().const_data_ptr(); cached.codes != address)
    cached = {address, made_of(index, codes)};
  return cached.weight;
}

QuantizedWeight QuantizedWeights::made_of(int64_t index, const FlatBuffer& codes) const {
  const Matrix& matrix = matrices_[static_cast<size_t>(index)];
  at::Tensor scales;
  if (block_scales_) {
    const bool is_cut = block_scales_->unshard.communicates();
    scales = (is_cut ? block_scales_->whole : block_scales_->own)
                 .at(block_layout_->tensor_range(index))
                 .view({matrix.rows, matrix.columns / recipe_.scale_columns});
  } else {
    scales = scales_.narrow(0, matrix.first_scale, matrix.scales.count)
                 .view({-1, matrix.scales.per_row});
  }
  return {.recipe = recipe_.recipe,
          .codes = codes.at(layout_.tensor_range(index))
                       .view({matrix.rows, matrix.columns})
                       .view(at::kFloat8_e4m3fn),
          .scales = scales,
          .weight_gradient = options_.weight_gradient};
}

at::Tensor QuantizedWeights::take_counts() {
  const at::Tensor counts = counts_.clone();
  counts_.zero_();
  return counts;
}

void tag_quantized(const at::Tensor& parameter, std::function<QuantizedWeight()> current) {
  c10::intrusive_ptr<c10::BackendMeta> tag;
  if (current) tag = c10::make_intrusive<QuantizedTag>(std::move(current));
  parameter.unsafeGetTensorImpl()->set_backend_meta(std::move(tag));
}

std::optional<QuantizedWeight> quantized_weight(const at::Tensor& parameter) {
  if (!parameter.defined()) return std::nullopt;
  const auto tag = parameter.unsafeGetTensorImpl()->get_backend_meta_intrusive_ptr();
  const auto* quantized = dynamic_cast<const QuantizedTag*>(tag.get());
  if (quantized == nullptr) return std::nullopt;
  return quantized->current();
}

}  // namespace fsdp
