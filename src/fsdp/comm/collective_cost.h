// The cost of a collective to a rank on GPUs of several hosts: bytes on each kind of link, launches
// and memory, as the backend `nccl` performs it. Numbers alone, so that a plan and a test of
// recorded calls count alike.
#pragma once

#include <cstdint>

#include "fsdp/comm/reduce/sum_order.h"

namespace fsdp {

// An all-reduce of no more than this is sent whole to everybody, a message instead of two; unless
// its values are watched (Reduction::nonfinite).
inline constexpr int64_t kOneShotBytes = int64_t{64} << 10;

enum class Collective : uint8_t { kAllGather, kReduceScatter, kAllReduce };

// The buffer when it is whole.
struct MovedBuffer {
  int64_t bytes = 0;
  int64_t element_bytes = 1;
  int64_t sum_bytes = 4;      // of an element of a running sum
  int64_t largest_share = 0;  // in elements; 0: shares are equal
};

struct CollectiveCost {
  int64_t near_bytes = 0;  // received from ranks of this host
  int64_t far_bytes = 0;   // received from other hosts, through this rank's card
  // Those that NCCL's ring would receive there, in the wire type.
  int64_t ring_far_bytes = 0;
  int64_t launches = 0;
  int64_t staging_bytes = 0;  // in which a reduction receives

  CollectiveCost& operator+=(const CollectiveCost& other);
  friend bool operator==(const CollectiveCost&, const CollectiveCost&) = default;
};

// Among ranks of whom `order.group` neighbours are on a host, which is also the order of sums.
CollectiveCost cost_of(Collective collective, const MovedBuffer& buffer, const SumOrder& order);

}  // namespace fsdp
