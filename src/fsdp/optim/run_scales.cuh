// The scales of a moment's blocks, as the warps of an update that works on several in a row hold
// them.
#pragma once

#include "fsdp/optim/update_lane.cuh"
#include "fsdp/optim/update_span.h"

namespace fsdp {

// As many as fill a sector of memory, 32 bytes. One by one, each would keep memory as busy as that:
// an update with two fp8 moments loses a tenth of its speed.
inline constexpr int kMaxRun = 8;
static_assert(kMaxRun <= kWarp);

// A lane holds the scale of the block with its number in the run. All are 1 where a moment has
// none.
class RunScales {
 public:
  // Of `count` blocks from `begin` on.
  __device__ RunScales(const Moment& moment, int64_t begin, int count)
      : moment_(moment), begin_(begin), lane_(threadIdx.x % kWarp), has_one_(lane_ < count) {
    if (is_scaled(moment_.dtype) && has_one_) scale_ = moment_.scales[begin_ + lane_];
  }
  __device__ float of(int k) const {
    return is_scaled(moment_.dtype) ? __shfl_sync(kAllLanes, scale_, k) : 1.0f;
  }
  __device__ void set(int k, float scale) {
    if (lane_ == k) scale_ = scale;
  }
  __device__ void store() const {
    if (is_scaled(moment_.dtype) && has_one_) moment_.scales[begin_ + lane_] = scale_;
  }

 private:
  const Moment& moment_;
  const int64_t begin_;
  const int lane_;
  const bool has_one_;
  float scale_ = 1.0f;
};

}  // namespace fsdp
