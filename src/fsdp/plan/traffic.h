// How many bytes one rank receives in one step, by collective and mesh axis.
#pragma once

#include <cstdint>

#include "fsdp/layout/strategy.h"

namespace fsdp {

// Bytes received by one rank. A gather or a reduce-scatter of B bytes over n ranks receives
// B (n-1)/n, an all-reduce twice that (a reduce-scatter and a gather): what any algorithm without
// redundant transfers moves. With shards of unequal length it is the mean over the ranks.
struct AxisTraffic {
  int64_t all_gather = 0;
  int64_t reduce_scatter = 0;
  int64_t all_reduce = 0;

  int64_t total() const { return all_gather + reduce_scatter + all_reduce; }
};

struct Traffic {
  AxisTraffic inner;
  AxisTraffic outer;

  AxisTraffic sum() const;
  Traffic& operator+=(const Traffic& other);
};

// One group's unsharded buffers, in bytes.
struct GroupBytes {
  int64_t weight = 0;
  // In the type gradients travel in; 0 for a group without gradients.
  int64_t wire = 0;
};

// The step of one microbatch, from placements alone:
//   weights    sharded between uses: gathered before each use (`num_gathers` times). Where the
//              optimizer is sharded and the weights are not: gathered once, after the update;
//   gradients  first brought from Partial to their own placement, then to the optimizer's.
// The inner axis is cut first, so what crosses the outer axis is an inner shard wherever there is
// one.
Traffic group_traffic(const Strategy& strategy, MeshShape mesh, GroupBytes bytes,
                      int64_t num_gathers);

}  // namespace fsdp
