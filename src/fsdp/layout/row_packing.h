// Segments for tensors whose bricks have different sizes: shares stay equal, no cut splits a brick.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "fsdp/layout/brick.h"
#include "fsdp/layout/segment.h"

namespace fsdp {

// A segment while it is being filled. Positions count from its own begin.
class SegmentPacker {
 public:
  struct Placed {
    BrickedTensor tensor;
    int64_t position = 0;
  };

  SegmentPacker(int64_t share_numel, int64_t num_shares);

  // Puts the tensor into the first gap that takes it; false when there is none.
  bool place(const BrickedTensor& tensor);

  int64_t share_numel() const { return share_numel_; }
  std::span<const Placed> placed() const { return placed_; }

 private:
  bool cuts_between_bricks(const BrickedTensor& tensor, int64_t position) const;
  int64_t position_in(const FlatRange& gap, const BrickedTensor& tensor) const;

  int64_t share_numel_;
  std::vector<FlatRange> gaps_;
  std::vector<Placed> placed_;
  BrickedTensor last_;    // the tensor placed last
  size_t first_gap_ = 0;  // gaps before this one refused it
};

// The segment with the shortest share found that takes all of the tensors, placed in the order
// given; nullopt when its share would have to be longer than max_share_numel. The share is a
// multiple of unit_numel, or as short as the volume allows where that works too.
std::optional<SegmentPacker> pack_segment(std::span<const BrickedTensor> tensors,
                                          int64_t unit_numel, int64_t align_numel,
                                          int64_t num_shares, int64_t max_share_numel);

// A gather is one coalesced launch over all segments, but each adds a little to it.
inline constexpr size_t kMaxRowSegments = 8;

// Tensors with bricks of one size form a class. Classes are taken from the largest brick to the
// smallest; each joins an existing segment when that costs no more than a segment of its own, and
// else gets one. Tensors of one brick and tensors that may be cut anywhere come last and fill gaps.
Packing pack_rows(std::span<const BrickedTensor> tensors, int64_t num_tensors, int64_t align_numel,
                  int64_t num_shares);

}  // namespace fsdp
