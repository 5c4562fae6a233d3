// A contiguous part of the flat buffer that is cut into one share per rank.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace fsdp {

// Elements [begin, end) of a flat buffer or of a flattened tensor.
struct FlatRange {
  int64_t begin = 0;
  int64_t end = 0;

  constexpr int64_t numel() const { return end - begin; }
  constexpr bool empty() const { return begin == end; }

  friend constexpr bool operator==(const FlatRange&, const FlatRange&) = default;
};

// The common part of two ranges; {0, 0} when there is none.
constexpr FlatRange intersect(FlatRange a, FlatRange b) {
  const FlatRange both{a.begin > b.begin ? a.begin : b.begin, a.end < b.end ? a.end : b.end};
  return both.begin < both.end ? both : FlatRange{};
}

class Segment {
 public:
  // A share with elements in it, of an uneven segment.
  struct UnevenShare {
    int64_t index = 0;
    int64_t numel = 0;
  };

  // num_shares shares of share_numel elements each, from flat position `begin` on.
  static Segment even(int64_t begin, int64_t share_numel, int64_t num_shares);

  // Shares of different lengths; those not listed are empty. Indices must increase.
  static Segment uneven(int64_t begin, std::span<const UnevenShare> shares);

  // Positions divided by `numel`, which divides them.
  Segment in_blocks_of(int64_t numel) const;

  FlatRange range() const { return {begin_, end_}; }
  bool is_even() const { return is_even_; }

  // The flat range of shares [first, last), which is contiguous.
  FlatRange shares(int64_t first, int64_t last) const;

  // Elements of every share of an even segment.
  int64_t share_numel() const;

  // The shares of an uneven segment that are not empty.
  std::vector<UnevenShare> uneven_shares() const;

  friend bool operator==(const Segment&, const Segment&) = default;

 private:
  struct ShareEnd {
    int64_t index = 0;
    int64_t end = 0;  // relative to the segment

    friend bool operator==(const ShareEnd&, const ShareEnd&) = default;
  };

  Segment() = default;

  int64_t begin_of_share(int64_t index) const;

  int64_t begin_ = 0;
  int64_t end_ = 0;
  bool is_even_ = true;
  int64_t share_numel_ = 0;     // when even
  std::vector<ShareEnd> ends_;  // when uneven
};

}  // namespace fsdp
