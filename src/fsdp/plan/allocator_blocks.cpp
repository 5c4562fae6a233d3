#include "fsdp/plan/allocator_blocks.h"

#include "fsdp/base/integer.h"

namespace fsdp {

namespace {

constexpr int64_t kMiB = int64_t{1} << 20;
constexpr int64_t kUnit = 512;
constexpr int64_t kSmall = kMiB;  // up to here pieces share segments that are split anywhere
constexpr int64_t kSharedSegment = 20 * kMiB;
constexpr int64_t kOwnSegment = 10 * kMiB;  // from here on
constexpr int64_t kSegmentUnit = 2 * kMiB;

}  // namespace

int64_t AllocatorBlocks::give(int64_t bytes) {
  const int64_t size = round_up(bytes, kUnit);
  if (size <= kSmall) return size;
  auto found = rests_.lower_bound(size);  // the smallest that fits
  if (found == rests_.end())
    found = rests_.insert(size < kOwnSegment ? kSharedSegment : round_up(size, kSegmentUnit));
  const int64_t block = *found;
  rests_.erase(found);
  const int64_t rest = block - size;
  if (rest <= kSmall) return block;
  rests_.insert(rest);
  return size;
}

}  // namespace fsdp
