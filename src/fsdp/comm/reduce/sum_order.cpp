#include "fsdp/comm/reduce/sum_order.h"

#include <algorithm>
#include <numeric>

#include "fsdp/base/check.h"
#include "fsdp/base/integer.h"

namespace fsdp {

bool SumOrder::adds_like(int other_group) const {
  const auto is_level = [&](int each) { return each == ranks || is_power_of_two(each); };
  return other_group == group || (is_level(other_group) && is_level(group));
}

int group_within(std::span<const int> blocks) {
  int group = 0;
  for (size_t begin = 0; begin < blocks.size();) {
    size_t end = begin;
    while (end < blocks.size() && blocks[end] == blocks[begin]) ++end;
    group = std::gcd(group, static_cast<int>(end - begin));
    begin = end;
  }
  return std::max(group, 1);
}

int chosen_group(int given, std::span<const int> blocks) {
  const auto ranks = static_cast<int>(blocks.size());
  if (ranks == 1)
    return 1;  // what is set for a job may be in the environment of its other programs
  if (given == 0) return group_within(blocks);
  FSDP_CHECK(given > 0 && ranks % given == 0, "sum_group (FSDP_SUM_GROUP) is ", given,
             ": it must divide the ", ranks, " ranks");
  return given;
}

ReductionPieces ReductionPieces::of(const SumOrder& order, int64_t largest_share,
                                    int64_t wire_bytes, int64_t wide_bytes) {
  // Pieces begin at multiples of 128 elements, so that kernels can load 16 bytes at once.
  constexpr int64_t kAligned = 128;
  const int64_t listed = order.ranks > kMaxListed ? order.ranks : order.ranks - 1;
  // With two hops: the contributions of a group to all ranks at this rank's place, their sums, and
  // the sums that come for this rank's share.
  const int64_t each = order.has_two_hops()
                           ? order.ranks * wire_bytes + 2 * order.num_groups() * wide_bytes
                           : listed * wire_bytes;
  if (each == 0) return {.numel = largest_share, .staging_bytes = 0};
  const int64_t fitting = std::max(kMostBytes / each / kAligned * kAligned, kAligned);
  const int64_t numel = std::min(fitting, largest_share);
  return {.numel = numel, .staging_bytes = checked_mul(numel, each)};
}

}  // namespace fsdp
