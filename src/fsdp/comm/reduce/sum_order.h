// The order in which the values of many ranks are added, and the pieces in which they travel to the
// rank that adds them.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <span>

namespace fsdp {

// A binary tree: of n values the first p are added, the others are, and both sums, where p is the
// largest power of two below n. Neighbours in groups of `group` are a tree each, and the groups'
// sums another one above. The order depends on these two numbers alone, so any backend may either
// add everything where it is needed or send sums of groups: the bits are the same.
//
//   ranks  0 1 2 3   4 5 6 7   8 9 10 11       group 4
//            a    +    b     +     c           a = (r0 + r1) + (r2 + r3), ...; (a + b) + c
//
// A network then carries one sum per group instead of `group` values. Groups of a power of two are
// a level of the tree over all ranks, so they change no bit.
struct SumOrder {
  int ranks = 1;
  int group = 1;  // divides `ranks`

  // In groups, or, where that makes no two hops, in one.
  static SumOrder of(int ranks, int group) {
    const SumOrder order{.ranks = ranks, .group = group};
    return order.has_two_hops() ? order : SumOrder{.ranks = ranks, .group = ranks};
  }

  // How many of n values, two or more, are added on the left.
  static size_t left_of(size_t n) { return std::bit_floor(n - 1); }
  // Whether the same ranks give the same bits in groups of another size.
  bool adds_like(int other_group) const;

  bool has_two_hops() const { return group > 1 && group < ranks; }
  int num_groups() const { return ranks / group; }
  int group_of(int rank) const { return rank / group; }
  int place_of(int rank) const { return rank % group; }  // in its group
  // The rank at that place of that group.
  int rank_at(int group_index, int place) const { return group_index * group + place; }
  // Whether messages go between two ranks when a share is added.
  bool adds_with(int rank, int other) const {
    return !has_two_hops() || group_of(rank) == group_of(other) ||
           place_of(rank) == place_of(other);
  }
};

// The group of ranks of which rank r lies in block blocks[r] (a host): the largest that divides
// every run of equal blocks, so that no group is in two of them.
int group_within(std::span<const int> blocks);

// The group of CommOptions::sum_group for these ranks, or where that is 0, group_within(blocks).
// An Error for one that does not divide the ranks.
int chosen_group(int given, std::span<const int> blocks);

// Contributions to a rank's share lie side by side until they are added. All shares travel in
// pieces of this many elements, so that the memory for them is bounded.
struct ReductionPieces {
  static constexpr int64_t kMostBytes = int64_t{64} << 20;
  // More contributions than this lie one after the other, this rank's own among them.
  static constexpr int kMaxListed = 32;

  int64_t numel = 0;          // of a share at a time
  int64_t staging_bytes = 0;  // what they take where all shares are equal

  // Sums of groups travel as `wide_bytes` per element, contributions as `wire_bytes`.
  static ReductionPieces of(const SumOrder& order, int64_t largest_share, int64_t wire_bytes,
                            int64_t wide_bytes);
};

}  // namespace fsdp
