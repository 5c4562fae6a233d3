// How small a shard can be at best, whatever the layout: what our own padding is measured against.
#pragma once

#include <cstdint>
#include <span>

#include "fsdp/layout/brick.h"

namespace fsdp {

// A size below which no layout can keep every rank's shard, when shards are equally long, tensors
// and shards start at multiples of align_numel, and no brick is split. Proof in docs/layout.md: for
// any a > 0, the pieces x of one rank satisfy sum(floor(x / a)) <= floor(shard / a), and some rank
// holds at least the average of these sums, so shard >= a * ceil(sum over all(floor(x / a)) /
// ranks).
int64_t min_shard_numel(std::span<const BrickedTensor> tensors, int64_t align_numel,
                        int64_t num_ranks);

}  // namespace fsdp
