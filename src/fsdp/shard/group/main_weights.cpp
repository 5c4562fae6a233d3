#include "fsdp/shard/group/main_weights.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <utility>

#include "fsdp/base/check.h"
#include "fsdp/base/torch_dtype.h"
#include "fsdp/layout/state_bytes.h"

namespace fsdp {

namespace {

int64_t width_of(at::ScalarType dtype) { return static_cast<int64_t>(c10::elementSize(dtype)); }

at::Tensor value_of(const MainWeightPiece& piece) {
  if (!piece.main.defined()) return piece.weight;
  return piece.is_split ? join_halves(piece.weight, piece.main) : piece.main;
}

// Rounds as updates do, so that a restored weight equals the saved one.
void round_into_weight(const MainWeightPiece& piece, const at::Tensor& values) {
  if (piece.weight.scalar_type() == at::kBFloat16 && values.scalar_type() == at::kFloat) {
    split_into_halves(values.to(piece.weight.device()), piece.weight,
                      at::empty_like(piece.weight, at::kShort));
  } else {
    piece.weight.copy_(values);
  }
}

void set_value(const MainWeightPiece& piece, const at::Tensor& values) {
  if (piece.is_split) {
    split_into_halves(values.to(piece.weight.device(), at::kFloat), piece.weight, piece.main);
    return;
  }
  if (piece.main.defined()) piece.main.copy_(values);
  round_into_weight(piece, values);
}

// Elements [begin, begin + numel) of a piece.
MainWeightPiece part_of(const MainWeightPiece& piece, FlatRange range) {
  MainWeightPiece part = piece;
  const int64_t begin = range.begin - piece.flat.begin;
  part.flat = range;
  part.weight = piece.weight.narrow(0, begin, range.numel());
  if (piece.main.defined()) part.main = piece.main.narrow(0, begin, range.numel());
  return part;
}

// Frozen codes are made of fp32 numbers that nothing else needs.
bool is_of_frozen_codes(const GroupTypes& types) {
  return types.is_quantized() && !types.trainable;
}

at::ScalarType main_dtype(const GroupTypes& types) {
  if (is_of_frozen_codes(types)) return at::kFloat;
  return scalar_type_of(types.main_weight.value_or(types.weight));
}

}  // namespace

at::Tensor join_halves(const at::Tensor& upper, const at::Tensor& remainder) {
  const at::Tensor shifted = upper.view(at::kShort).to(at::kInt).bitwise_left_shift(16);
  return shifted.add_(remainder).view(at::kFloat);
}

void split_into_halves(const at::Tensor& values, const at::Tensor& upper,
                       const at::Tensor& remainder) {
  // Rounding up the bits of a NaN could make it a number.
  const at::Tensor clean = at::where(values.isnan(), at::full_like(values, NAN), values);
  const at::Tensor bits = clean.contiguous().view(at::kInt);
  const at::Tensor nearest = bits.add(0x8000).bitwise_right_shift(16);
  upper.view(at::kShort).copy_(nearest);
  remainder.copy_(bits - nearest.bitwise_left_shift(16));
}

MainWeights::MainWeights(const FlatLayout& layout, const GroupTypes& types,
                         const GroupSetting& setting, const FlatBuffer& weight)
    : dtype_(main_dtype(types)), model_device_(setting.device) {
  const StatePlaces places =
      state_places(layout.shard_ranges(setting.strategy.optimizer, setting.rank),
                   types.trainable ? setting.offload.fraction : 0.0);
  const int64_t align_bytes = layout.request().align_bytes;
  device_ = Slab(setting.memory.main_weight,
                 numel_of(places.device) *
                     (is_of_frozen_codes(types) ? width_of(dtype_) : main_weight_bytes(types)),
                 align_bytes);
  host_ = Slab(setting.memory.host, numel_of(places.host) * host_weight_bytes(types), align_bytes);
  add_pieces(places.device, device_, types.split ? at::kShort : dtype_, setting.device, weight,
             types.is_quantized());
  for (MainWeightPiece& piece : pieces_) piece.is_split = types.split;
  const size_t num_on_device = pieces_.size();
  add_pieces(places.host, host_, dtype_, c10::kCPU, weight, types.is_quantized());
  for (size_t i = num_on_device; i < pieces_.size(); ++i) pieces_[i].is_offloaded = true;
}

void MainWeights::add_pieces(const std::vector<ShardRange>& ranges, const Slab& slab,
                             at::ScalarType dtype, c10::Device device, const FlatBuffer& weight,
                             bool is_quantized) {
  int64_t begin = 0;
  for (const ShardRange& range : ranges) {
    MainWeightPiece& piece = pieces_.emplace_back();
    piece.flat = range.flat;
    if (slab.bytes() > 0) {
      piece.main = tensor_over(slab.at(begin * width_of(dtype)), range.flat.numel(), dtype, device);
      piece.main.zero_();  // padding takes part in updates
    }
    // Codes are made of main weights later (quantized_weights.h); nobody else has numbers.
    piece.weight = is_quantized ? std::exchange(piece.main, {}) : weight.at(range.flat);
    begin += range.flat.numel();
  }
}

bool MainWeights::has_views() const {
  return std::none_of(pieces_.begin(), pieces_.end(), [](const MainWeightPiece& piece) {
    return piece.is_split || piece.is_offloaded;
  });
}

at::Tensor MainWeights::at(FlatRange range) const {
  std::vector<at::Tensor> parts;
  for (const MainWeightPiece& piece : pieces_) {
    const FlatRange common = intersect(piece.flat, range);
    if (common.empty()) continue;
    parts.push_back(value_of(part_of(piece, common)));
    if (piece.is_offloaded) parts.back() = parts.back().to(model_device_);
  }
  if (parts.size() == 1) return parts.front();
  if (!parts.empty()) return at::cat(parts);
  FSDP_ASSERT(range.empty(), "element ", range.begin, " is not in the optimizer's part");
  return at::empty({0}, at::dtype(dtype_).device(model_device_));
}

void MainWeights::drop() {
  pieces_.clear();
  device_ = Slab();
  is_dropped_ = true;
}

void MainWeights::copy_to(FlatRange range, const at::Tensor& into) const {
  FSDP_CHECK(!is_dropped_,
             "frozen weights have codes alone (Sharded::drop_frozen_numbers); read "
             "their numbers where they were loaded from");
  for (const MainWeightPiece& piece : pieces_) {
    const FlatRange common = intersect(piece.flat, range);
    if (common.empty()) continue;
    into.narrow(0, common.begin - range.begin, common.numel())
        .copy_(value_of(part_of(piece, common)));
  }
}

const void* MainWeights::in_host_memory(FlatRange range, at::ScalarType dtype) const {
  for (const MainWeightPiece& piece : pieces_) {
    if (!(intersect(piece.flat, range) == range)) continue;
    const at::Tensor& values = piece.main.defined() ? piece.main : piece.weight;
    if (piece.is_split || !values.is_cpu() || values.scalar_type() != dtype) return nullptr;
    return static_cast<const std::byte*>(values.const_data_ptr()) +
           (range.begin - piece.flat.begin) * width_of(dtype);
  }
  return nullptr;
}

void* MainWeights::settable_in_host_memory(FlatRange range, at::ScalarType dtype) {
  for (const MainWeightPiece& piece : pieces_)
    if (!intersect(piece.flat, range).empty() && piece.main.defined()) return nullptr;
  is_rewritten_ = true;  // by the caller
  return const_cast<void*>(in_host_memory(range, dtype));
}

void MainWeights::set(FlatRange range, const at::Tensor& values) {
  FSDP_CHECK(!is_dropped_,
             "frozen weights have codes alone (Sharded::drop_frozen_numbers) and "
             "take no values; shard the model again");
  is_rewritten_ = true;
  const at::Tensor flat = values.reshape({-1});
  for (const MainWeightPiece& piece : pieces_) {
    const FlatRange common = intersect(piece.flat, range);
    if (!common.empty())
      set_value(part_of(piece, common), flat.narrow(0, common.begin - range.begin, common.numel()));
  }
}

void MainWeights::refresh() {
  is_rewritten_ = is_refreshed_ = true;
  for (const MainWeightPiece& piece : pieces_)
    if (piece.main.defined() && !piece.is_split) piece.weight.copy_(piece.main);
}

bool MainWeights::take_is_rewritten() {
  if (std::exchange(is_refreshed_, false))
    for (const MainWeightPiece& piece : pieces_)
      if (piece.main.defined() && !piece.is_split) round_into_weight(piece, piece.main);
  return std::exchange(is_rewritten_, false);
}

}  // namespace fsdp
