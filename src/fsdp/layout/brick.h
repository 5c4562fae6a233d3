// A tensor as the packers see it: a size, and the piece of it that no cut may split. And how small
// the shards of such tensors can be at best, which our own padding is measured against.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "fsdp/layout/segment.h"

namespace fsdp {

// Tensors and shares both start at multiples of the alignment, so a cut lies at a multiple of both
// the alignment and the indivisible piece (row, block): their least common multiple is a brick. A
// tensor is a row of equal bricks whose last one may be shorter.
struct BrickedTensor {
  int64_t tensor = 0;       // index in the request
  int64_t numel = 0;        // rounded up to the alignment, > 0
  int64_t brick_numel = 0;  // a multiple of the alignment, at most numel

  bool is_single_brick() const { return brick_numel == numel; }
};

using BrickedTensors = std::vector<BrickedTensor>;

// `indivisible_numel` >= 1; sizes that would overflow end as one brick.
BrickedTensor bricked(int64_t tensor, int64_t numel, int64_t indivisible_numel,
                      int64_t align_numel);

// What a packer decides: where each tensor starts, and the segments, which lie one after another.
struct Packing {
  std::vector<int64_t> offsets;  // per tensor of the request; 0 for those that were not packed
  std::vector<Segment> segments;
};

// A size below which no layout can keep every rank's shard, when shards are equally long, tensors
// and shards start at multiples of align_numel, and no brick is split. Proof in docs/layout.md: for
// any a > 0, the pieces x of one rank satisfy sum(floor(x / a)) <= floor(shard / a), and some rank
// holds at least the average of these sums, so shard >= a * ceil(sum over all(floor(x / a)) /
// ranks).
int64_t min_shard_numel(std::span<const BrickedTensor> tensors, int64_t align_numel,
                        int64_t num_ranks);

}  // namespace fsdp
