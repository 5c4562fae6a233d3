// What libtorch's CUDA allocator gives out for what it is asked for: blocks, rounded up.
#pragma once

#include <cstdint>
#include <set>

namespace fsdp {

// Follows that allocator (with its default settings) through requests that are all kept. Pieces of
// more than 1 MiB come from segments of 20 MiB or, from 10 MiB on, from ones of their own in
// multiples of 2 MiB; a rest of up to 1 MiB is not worth splitting off and goes with the piece.
class AllocatorBlocks {
 public:
  // The bytes of the block, at least `bytes`.
  int64_t give(int64_t bytes);

 private:
  std::multiset<int64_t> rests_;  // of segments, free
};

}  // namespace fsdp
