#include "fsdp/layout/row_packing.h"

#include <algorithm>
#include <map>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

#include "fsdp/base/integer.h"
#include "fsdp/layout/segment_packer.h"

namespace fsdp {
namespace {

using Tensors = std::vector<BrickedTensor>;

// Each round shortens a share by one unit; a class that could move more than this joins a segment.
constexpr int kMaxDrainRounds = 16;

// A segment fewer is worth this part of the shard in padding: 1 / 2048, 0.05 %.
constexpr int64_t kSegmentWorth = 2048;

struct OpenSegment {
  SegmentPacker packer;
  int64_t unit_numel = 0;
};

Tensors tensors_of(const SegmentPacker& packer) {
  Tensors tensors;
  for (const SegmentPacker::Placed& placed : packer.placed()) tensors.push_back(placed.tensor);
  return tensors;
}

int64_t volume_of(const Tensors& tensors) {
  int64_t volume = 0;
  for (const BrickedTensor& tensor : tensors) volume = checked_add(volume, tensor.numel);
  return volume;
}

class RowPacker {
 public:
  RowPacker(int64_t align_numel, int64_t num_shares)
      : align_numel_(align_numel), num_shares_(num_shares) {}

  // Tensors that fit wherever there is room; the rest become a class.
  void add_fillers(const Tensors& tensors) {
    Tensors rest;
    for (const BrickedTensor& tensor : tensors) {
      if (!place_in(segments_, tensor)) rest.push_back(tensor);
    }
    add_class(rest, align_numel_);
  }

  void add_class(const Tensors& tensors, int64_t unit_numel) {
    if (tensors.empty()) return;
    Alone alone = drained(tensors, unit_numel);
    const std::optional<Joined> joined = best_join(tensors, alone);
    if (joined) {
      segments_[joined->segment].packer = joined->packer;
    } else {
      segments_ = std::move(alone.others);
      segments_.push_back(std::move(alone.own));
    }
  }

  Packing finish(int64_t num_tensors) const {
    Packing packing{.offsets = std::vector<int64_t>(static_cast<size_t>(num_tensors), 0),
                    .segments = {}};
    int64_t begin = 0;
    for (const OpenSegment& segment : segments_) {
      for (const SegmentPacker::Placed& placed : segment.packer.placed()) {
        packing.offsets[static_cast<size_t>(placed.tensor.tensor)] = begin + placed.position;
      }
      packing.segments.push_back(Segment::even(begin, segment.packer.share_numel(), num_shares_));
      begin = packing.segments.back().range().end;
    }
    return packing;
  }

 private:
  struct Alone {
    std::vector<OpenSegment> others;
    OpenSegment own;
  };
  struct Joined {
    size_t segment = 0;
    SegmentPacker packer;
  };

  static bool place_in(std::vector<OpenSegment>& segments, const BrickedTensor& tensor) {
    return std::any_of(segments.begin(), segments.end(),
                       [&](OpenSegment& segment) { return segment.packer.place(tensor); });
  }

  SegmentPacker pack(const Tensors& tensors, int64_t unit_numel) const {
    return *pack_segment(tensors, unit_numel, align_numel_, num_shares_, INT64_MAX);
  }

  // The segment whose share grows least when it takes the whole class, if that is worth it.
  std::optional<Joined> best_join(const Tensors& tensors, const Alone& alone) const {
    int64_t total_numel = alone.own.packer.share_numel();
    for (const OpenSegment& segment : segments_) total_numel += segment.packer.share_numel();
    int64_t max_growth = alone.own.packer.share_numel() + total_numel / kSegmentWorth;
    if (segments_.size() == kMaxRowSegments) max_growth = INT64_MAX;

    std::optional<Joined> best;
    for (size_t i = 0; i < segments_.size(); ++i) {
      const OpenSegment& segment = segments_[i];
      const int64_t share_numel = segment.packer.share_numel();
      Tensors all = tensors_of(segment.packer);
      all.insert(all.end(), tensors.begin(), tensors.end());
      const int64_t limit =
          max_growth > INT64_MAX - share_numel ? INT64_MAX : share_numel + max_growth;
      auto packer = pack_segment(all, segment.unit_numel, align_numel_, num_shares_, limit);
      if (!packer) continue;
      const int64_t growth = packer->share_numel() - share_numel;
      best = Joined{.segment = i, .packer = *std::move(packer)};
      if (growth <= 0) break;
      max_growth = growth - 1;
    }
    return best;
  }

  // A segment of the class's own, after as many of its tensors as it takes to shorten the share
  // have moved into the gaps of the others.
  Alone drained(const Tensors& tensors, int64_t unit_numel) const {
    Tensors kept = tensors;
    Alone best{.others = segments_, .own = {pack(kept, unit_numel), unit_numel}};
    for (int round = 0; round < kMaxDrainRounds && !kept.empty(); ++round) {
      const int64_t share_numel = best.own.packer.share_numel();
      const int64_t target = (ceil_div(share_numel, unit_numel) - 1) * unit_numel;
      int64_t excess = volume_of(kept) - checked_mul(target, num_shares_);
      std::vector<OpenSegment> others = best.others;
      Tensors still_kept;
      for (const BrickedTensor& tensor : kept) {
        if (excess > 0 && place_in(others, tensor)) {
          excess -= tensor.numel;
        } else {
          still_kept.push_back(tensor);
        }
      }
      if (excess > 0) break;
      SegmentPacker own = pack(still_kept, unit_numel);
      if (own.share_numel() >= share_numel) break;
      kept = std::move(still_kept);
      best = {.others = std::move(others), .own = {std::move(own), unit_numel}};
    }
    return best;
  }

  int64_t align_numel_;
  int64_t num_shares_;
  std::vector<OpenSegment> segments_;
};

}  // namespace

Packing pack_rows(std::span<const BrickedTensor> tensors, int64_t num_tensors, int64_t align_numel,
                  int64_t num_shares) {
  Tensors sorted(tensors.begin(), tensors.end());
  std::stable_sort(sorted.begin(), sorted.end(),
                   [](const BrickedTensor& a, const BrickedTensor& b) {
                     return std::tie(a.brick_numel, a.numel) > std::tie(b.brick_numel, b.numel);
                   });
  std::map<int64_t, Tensors, std::greater<>> classes;
  Tensors single_bricks;
  Tensors divisible;
  for (const BrickedTensor& tensor : sorted) {
    if (tensor.brick_numel == align_numel) {
      divisible.push_back(tensor);
    } else if (tensor.is_single_brick()) {
      single_bricks.push_back(tensor);
    } else {
      classes[tensor.brick_numel].push_back(tensor);
    }
  }
  RowPacker packer(align_numel, num_shares);
  for (const auto& [brick_numel, members] : classes) packer.add_class(members, brick_numel);
  packer.add_fillers(single_bricks);
  packer.add_fillers(divisible);
  return packer.finish(num_tensors);
}

}  // namespace fsdp
