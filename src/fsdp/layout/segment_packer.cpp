#include "fsdp/layout/segment_packer.h"

#include <algorithm>
#include <utility>

#include "fsdp/base/error.h"
#include "fsdp/base/integer.h"

namespace fsdp {
namespace {

constexpr int64_t kNowhere = -1;

std::optional<SegmentPacker> try_pack(std::span<const BrickedTensor> tensors, int64_t share_numel,
                                      int64_t num_shares) {
  SegmentPacker packer(share_numel, num_shares);
  for (const BrickedTensor& tensor : tensors) {
    if (!packer.place(tensor)) return std::nullopt;
  }
  return packer;
}

}  // namespace

SegmentPacker::SegmentPacker(int64_t share_numel, int64_t num_shares) : share_numel_(share_numel) {
  if (share_numel > 0) gaps_.push_back({0, checked_mul(share_numel, num_shares)});
}

// Cuts lie at multiples of the share. The first one inside the tensor must meet a brick's end; when
// there are more, the share must be a whole number of bricks as well.
bool SegmentPacker::cuts_between_bricks(const BrickedTensor& tensor, int64_t position) const {
  const int64_t end = position + tensor.numel;
  const int64_t first_cut = (position / share_numel_ + 1) * share_numel_;
  if (first_cut >= end) return true;
  if ((first_cut - position) % tensor.brick_numel != 0) return false;
  return end - first_cut <= share_numel_ || share_numel_ % tensor.brick_numel == 0;
}

int64_t SegmentPacker::position_in(const FlatRange& gap, const BrickedTensor& tensor) const {
  if (gap.numel() < tensor.numel) return kNowhere;
  const int64_t next_cut = (gap.begin / share_numel_ + 1) * share_numel_;
  const int64_t bricks_before_cut = (next_cut - gap.begin) / tensor.brick_numel;
  // At once; with whole bricks before the next cut; after the next cut.
  for (const int64_t position :
       {gap.begin, next_cut - bricks_before_cut * tensor.brick_numel, next_cut}) {
    if (position + tensor.numel > gap.end) return kNowhere;
    if (cuts_between_bricks(tensor, position)) return position;
  }
  return kNowhere;
}

bool SegmentPacker::place(const BrickedTensor& tensor) {
  // Models repeat shapes by the hundred. A gap that refused one refuses its twins, so go on behind
  // it.
  const bool is_twin = tensor.numel == last_.numel && tensor.brick_numel == last_.brick_numel;
  last_ = tensor;
  if (!is_twin) first_gap_ = 0;
  for (; first_gap_ < gaps_.size(); ++first_gap_) {
    const FlatRange gap = gaps_[first_gap_];
    const int64_t position = position_in(gap, tensor);
    if (position == kNowhere) continue;
    placed_.push_back({tensor, position});
    const auto at = gaps_.begin() + static_cast<std::ptrdiff_t>(first_gap_);
    const FlatRange before{gap.begin, position};
    *at = {position + tensor.numel, gap.end};
    if (at->empty()) gaps_.erase(at);
    if (!before.empty()) {
      gaps_.insert(gaps_.begin() + static_cast<std::ptrdiff_t>(first_gap_), before);
      ++first_gap_;
    }
    return true;
  }
  return false;
}

std::optional<SegmentPacker> pack_segment(std::span<const BrickedTensor> tensors,
                                          int64_t unit_numel, int64_t align_numel,
                                          int64_t num_shares, int64_t max_share_numel) {
  int64_t volume = 0;
  for (const BrickedTensor& tensor : tensors) volume = checked_add(volume, tensor.numel);
  const int64_t shortest = round_up(ceil_div(volume, num_shares), align_numel);
  if (shortest > max_share_numel) return std::nullopt;
  if (auto packer = try_pack(tensors, shortest, num_shares)) return packer;

  // A limit that does not do is the common case when it is finite.
  if (max_share_numel != INT64_MAX &&
      !try_pack(tensors, max_share_numel / unit_numel * unit_numel, num_shares)) {
    return std::nullopt;
  }
  // Lengths in units from here on. Double the step until it fits (one share that holds the whole
  // volume always does), then halve.
  const int64_t longest = max_share_numel / unit_numel;
  int64_t too_short = ceil_div(shortest, unit_numel) - 1;
  int64_t long_enough = too_short;
  std::optional<SegmentPacker> best;
  for (int64_t step = 1; !best; step *= 2) {
    if (too_short >= longest) return std::nullopt;
    long_enough = std::min(too_short + step, longest);
    best = try_pack(tensors, checked_mul(long_enough, unit_numel), num_shares);
    if (!best) too_short = long_enough;
  }
  while (long_enough - too_short > 1) {
    const int64_t middle = too_short + (long_enough - too_short) / 2;
    if (auto packer = try_pack(tensors, middle * unit_numel, num_shares)) {
      best = std::move(packer);
      long_enough = middle;
    } else {
      too_short = middle;
    }
  }
  return best;
}

}  // namespace fsdp
