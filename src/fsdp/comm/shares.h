// How the elements of one flat tensor are divided among the ranks of a communicator.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace fsdp {

// Equal shares need no memory of their own, so that the everyday case allocates nothing.
class Shares {
 public:
  Shares() = default;

  // Every rank has `numel_per_rank`.
  static Shares equal(int64_t numel_per_rank, int ranks);

  // Rank r has `counts[r]`; zero is fine.
  static Shares uneven(std::span<const int64_t> counts);

  // `numel` cut into pieces of equal size except the last ones, each piece starting at a multiple
  // of `multiple`: how an all-reduce is divided into work for each rank.
  static Shares cut(int64_t numel, int ranks, int64_t multiple);

  int64_t count(int rank) const { return end(rank) - offset(rank); }
  int64_t offset(int rank) const;
  int64_t total() const { return ranks_ == 0 ? 0 : end(ranks_ - 1); }
  int64_t largest() const;
  int ranks() const { return ranks_; }
  bool is_equal() const { return ends_.empty(); }

 private:
  int64_t end(int rank) const;

  int ranks_ = 0;
  int64_t equal_count_ = 0;
  std::vector<int64_t> ends_;  // running sums; empty when the shares are equal
};

}  // namespace fsdp
