#include "fsdp/layout/segment.h"

#include <algorithm>
#include <utility>

#include "fsdp/base/error.h"
#include "fsdp/base/integer.h"

namespace fsdp {

Segment::Segment(int64_t begin, int64_t end, int64_t max_share_numel, std::vector<int64_t> cuts)
    : begin_(begin), end_(end), max_share_numel_(max_share_numel), cuts_(std::move(cuts)) {}

Segment Segment::even(int64_t begin, int64_t share_numel, int64_t num_shares) {
  FSDP_ASSERT(begin >= 0 && share_numel >= 0 && num_shares >= 1);
  const int64_t end = checked_add(begin, checked_mul(share_numel, num_shares));
  return Segment(begin, end, share_numel, {});
}

Segment Segment::uneven(int64_t begin, std::vector<int64_t> cuts) {
  FSDP_ASSERT(begin >= 0 && cuts.size() >= 2 && cuts.front() == 0);
  int64_t max_share_numel = 0;
  for (size_t i = 1; i < cuts.size(); ++i) {
    FSDP_ASSERT(cuts[i] >= cuts[i - 1], "cut ", i);
    max_share_numel = std::max(max_share_numel, cuts[i] - cuts[i - 1]);
  }
  const int64_t end = checked_add(begin, cuts.back());
  return Segment(begin, end, max_share_numel, std::move(cuts));
}

FlatRange Segment::shares(int64_t first, int64_t last) const {
  if (is_even()) return {begin_ + first * max_share_numel_, begin_ + last * max_share_numel_};
  return {begin_ + cuts_.at(static_cast<size_t>(first)),
          begin_ + cuts_.at(static_cast<size_t>(last))};
}

}  // namespace fsdp
