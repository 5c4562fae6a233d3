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

class RowPacker {
 public:
  RowPacker(int64_t align_numel, int64_t num_shares)
      : align_numel_(align_numel), num_shares_(num_shares) {}

  // Tensors that fit wherever there is room; the rest become a class.
  void add_fillers(const Tensors& tensors) {
    Tensors rest;
    for (const BrickedTensor& tensor : tensors) {
      if (!place_anywhere(tensor)) rest.push_back(tensor);
    }
    add_class(rest, align_numel_);
  }

  void add_class(const Tensors& tensors, int64_t unit_numel) {
    if (tensors.empty()) return;
    OpenSegment own{*pack_segment(tensors, unit_numel, align_numel_, num_shares_, INT64_MAX),
                    unit_numel};
    std::optional<Joined> joined = best_join(tensors, own.packer.share_numel());
    if (joined) {
      segments_[joined->segment].packer = std::move(joined->packer);
    } else {
      segments_.push_back(std::move(own));
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
  struct Joined {
    size_t segment = 0;
    SegmentPacker packer;
  };

  bool place_anywhere(const BrickedTensor& tensor) {
    return std::any_of(segments_.begin(), segments_.end(),
                       [&](OpenSegment& segment) { return segment.packer.place(tensor); });
  }

  // The segment whose share grows least when it takes the whole class, if that is worth it.
  std::optional<Joined> best_join(const Tensors& tensors, int64_t own_share_numel) const {
    int64_t total_numel = own_share_numel;
    for (const OpenSegment& segment : segments_) {
      total_numel = checked_add(total_numel, segment.packer.share_numel());
    }
    int64_t max_growth = checked_add(own_share_numel, total_numel / kSegmentWorth);
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
