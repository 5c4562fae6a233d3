#include "fsdp/layout/segment.h"

#include <algorithm>

#include "fsdp/base/check.h"
#include "fsdp/base/integer.h"

namespace fsdp {

Segment Segment::even(int64_t begin, int64_t share_numel, int64_t num_shares) {
  FSDP_ASSERT(begin >= 0 && share_numel >= 0 && num_shares >= 1);
  Segment segment;
  segment.begin_ = begin;
  segment.end_ = checked_add(begin, checked_mul(share_numel, num_shares));
  segment.share_numel_ = share_numel;
  return segment;
}

Segment Segment::uneven(int64_t begin, std::span<const UnevenShare> shares) {
  FSDP_ASSERT(begin >= 0);
  Segment segment;
  segment.begin_ = begin;
  segment.is_even_ = false;
  ShareEnd last{.index = -1, .end = 0};
  for (const UnevenShare& share : shares) {
    FSDP_ASSERT(share.index > last.index && share.numel > 0, "share ", share.index);
    last = {.index = share.index, .end = checked_add(last.end, share.numel)};
    segment.ends_.push_back(last);
  }
  segment.end_ = checked_add(begin, last.end);
  return segment;
}

Segment Segment::in_blocks_of(int64_t numel) const {
  Segment blocks = *this;
  const auto divide = [&](int64_t& position) {
    FSDP_ASSERT(position % numel == 0, "position ", position, " inside a block of ", numel);
    position /= numel;
  };
  divide(blocks.begin_);
  divide(blocks.end_);
  divide(blocks.share_numel_);
  for (ShareEnd& share : blocks.ends_) divide(share.end);
  return blocks;
}

FlatRange Segment::shares(int64_t first, int64_t last) const {
  return {begin_of_share(first), begin_of_share(last)};
}

int64_t Segment::begin_of_share(int64_t index) const {
  if (is_even_) return begin_ + index * share_numel_;
  const auto it = std::partition_point(ends_.begin(), ends_.end(),
                                       [&](const ShareEnd& share) { return share.index < index; });
  return it == ends_.begin() ? begin_ : begin_ + std::prev(it)->end;
}

int64_t Segment::share_numel() const {
  FSDP_ASSERT(is_even_, "shares of an uneven segment differ");
  return share_numel_;
}

std::vector<Segment::UnevenShare> Segment::uneven_shares() const {
  FSDP_ASSERT(!is_even_);
  std::vector<UnevenShare> result;
  int64_t begin = 0;
  for (const ShareEnd& share : ends_) {
    result.push_back({.index = share.index, .numel = share.end - begin});
    begin = share.end;
  }
  return result;
}

}  // namespace fsdp
