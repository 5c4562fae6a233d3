// A contiguous part of the flat buffer that is cut into one share per rank.
#pragma once

#include <cstdint>
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

// What two ranges share; {0, 0} when nothing.
constexpr FlatRange intersect(FlatRange a, FlatRange b) {
  const FlatRange both{a.begin > b.begin ? a.begin : b.begin, a.end < b.end ? a.end : b.end};
  return both.begin < both.end ? both : FlatRange{};
}

class Segment {
 public:
  // num_shares shares of share_numel elements each, from flat position `begin` on.
  static Segment even(int64_t begin, int64_t share_numel, int64_t num_shares);

  // Shares that end where they like: cuts[i] is the begin of share i relative to `begin`, and the
  // last entry the end of the last share. Not decreasing, first entry 0.
  static Segment uneven(int64_t begin, std::vector<int64_t> cuts);

  FlatRange range() const { return {begin_, end_}; }

  // The flat range of shares [first, last), which is contiguous.
  FlatRange shares(int64_t first, int64_t last) const;

  // Elements of the largest share; of every share when even.
  int64_t max_share_numel() const { return max_share_numel_; }
  bool is_even() const { return cuts_.empty(); }

  friend bool operator==(const Segment&, const Segment&) = default;

 private:
  Segment(int64_t begin, int64_t end, int64_t max_share_numel, std::vector<int64_t> cuts);

  int64_t begin_;
  int64_t end_;
  int64_t max_share_numel_;
  std::vector<int64_t> cuts_;  // empty when even
};

}  // namespace fsdp
