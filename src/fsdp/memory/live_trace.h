// Which buckets are live when, over one training step: what the planned pool is computed from.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "fsdp/memory/bucket.h"

namespace fsdp {

// One stay of a bucket in memory. Times are counted in computed units: at time t the t-th unit of
// the step computes. Both ends are included.
struct LiveInterval {
  BucketId bucket;
  int64_t bytes = 0;
  int32_t first = 0;
  int32_t last = 0;
  // A prefetch that is still hidden behind computation when it begins one time later.
  bool may_begin_later = false;
  // Intervals of one unit that are acquired by one call share a group and begin together.
  int32_t group = -1;
};

// The stays of one step in the order in which they are acquired. The n-th stay of a bucket in here
// is its n-th acquire in a step.
struct LiveTrace {
  std::vector<LiveInterval> intervals;
  int32_t num_times = 0;
  // The depth it was built for; -1 for a trace that came from elsewhere.
  int32_t prefetch = -1;
};

// Live bytes at every time of the step.
std::vector<int64_t> live_bytes(const LiveTrace& trace);

// No placement can be smaller than the most bytes live at one time.
int64_t lower_bound_bytes(const LiveTrace& trace);

// Most units of which something of this role is live at one time: what a pool with slots needs.
int32_t most_live_units(const LiveTrace& trace, const BucketTable& table, BucketRole role);

// Throws unless every interval is inside the step, names a declared bucket with its bytes, and no
// bucket is live twice at one time.
void check_trace(const LiveTrace& trace, const BucketTable& table);

}  // namespace fsdp
