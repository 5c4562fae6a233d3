// How tensors become segments of a flat buffer. Rows: shares stay equal, and no cut splits a brick.
// Whole tensors: they are spread over ranks so that no rank holds much more than the others. And
// how small the shards of such tensors can be at best, which our own padding is measured against.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "fsdp/layout/segment.h"
#include "fsdp/layout/strategy.h"

namespace fsdp {

// A tensor as the packers see it: a size, and the piece of it that no cut may split.
//
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

// The decision of a packer: where each tensor starts, and the segments, which lie one after
// another.
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

// Tensors with bricks of one size form a class. Classes are taken from the largest brick to the
// smallest; each joins an existing segment when that costs no more than a segment of its own, and
// else gets one. Tensors of one brick and tensors that may be cut anywhere come last and fill gaps.
Packing pack_rows(std::span<const BrickedTensor> tensors, int64_t num_tensors, int64_t align_numel,
                  int64_t num_shares);

// One segment with uneven shares. Tensors go, largest first, to the inner rank with the least so
// far, and those of an inner rank likewise to its outer ranks; so the largest inner shard is at
// most 4/3 of the best possible (Graham 1969). Within a share tensors keep the order of the
// request. `held_load`, by share, is what the ranks hold of other groups; empty for nothing.
Packing balance_tensors(std::span<const BrickedTensor> tensors, int64_t num_tensors, MeshShape mesh,
                        std::span<const int64_t> held_load);

}  // namespace fsdp
