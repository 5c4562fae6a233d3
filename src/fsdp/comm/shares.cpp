#include "fsdp/comm/shares.h"

#include <algorithm>

#include "fsdp/base/integer.h"

namespace fsdp {

Shares Shares::equal(int64_t numel_per_rank, int ranks) {
  Shares shares;
  shares.ranks_ = ranks;
  shares.equal_count_ = numel_per_rank;
  return shares;
}

Shares Shares::uneven(std::span<const int64_t> counts) {
  Shares shares;
  shares.ranks_ = static_cast<int>(counts.size());
  int64_t end = 0;
  for (size_t rank = 0; rank < counts.size(); ++rank) {
    FSDP_CHECK(counts[rank] >= 0, "counts[", rank, "] is ", counts[rank],
               ": a rank's number of elements must be 0 or more");
    end = checked_add(end, counts[rank]);
    shares.ends_.push_back(end);
  }
  return shares;
}

Shares Shares::cut(int64_t numel, int ranks, int64_t multiple) {
  const int64_t piece = round_up(ceil_div(numel, ranks), multiple);
  if (piece * ranks == numel) return equal(piece, ranks);
  Shares shares;
  shares.ranks_ = ranks;
  for (int rank = 0; rank < ranks; ++rank)
    shares.ends_.push_back(std::min(numel, piece * (rank + 1)));
  return shares;
}

int64_t Shares::offset(int rank) const { return rank == 0 ? 0 : end(rank - 1); }

int64_t Shares::end(int rank) const {
  return is_equal() ? equal_count_ * (rank + 1) : ends_[static_cast<size_t>(rank)];
}

int64_t Shares::largest() const {
  int64_t largest = equal_count_;
  for (int rank = 0; rank < ranks_; ++rank) largest = std::max(largest, count(rank));
  return largest;
}

}  // namespace fsdp
