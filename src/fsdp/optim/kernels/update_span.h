// The elements that an optimizer updates with one set of hyper-parameters: addresses and types.
#pragma once

#include <cstdint>
#include <vector>

#include "fsdp/base/dtype.h"
#include "fsdp/layout/state_bytes.h"

namespace fsdp {

// Where the optimizer's own copy of a weight is.
enum class MainWeight : uint8_t {
  kIsWeight,  // nowhere else: the weight itself is updated
  kSeparate,  // fp32, beside the weight, which is rounded from it
  kSplit,     // the weight (bf16) is the upper half, beside its remainder (split_weight.h)
};

// One moment (or momentum).
struct Moment {
  void* values = nullptr;
  float* scales = nullptr;  // one per block that the span touches, where is_scaled(dtype)
  DType dtype = DType::kFloat32;
};

// Pointers of one memory, a host's or a device's.
struct UpdateSpan {
  const void* gradient = nullptr;
  DType gradient_dtype = DType::kFloat32;  // fp32, bf16, fp16: used as it is, never copied

  void* weight = nullptr;  // for computing; written by every update
  DType weight_dtype = DType::kFloat32;
  MainWeight main = MainWeight::kIsWeight;
  void* main_weight = nullptr;  // fp32 or the remainder, as `main` says

  Moment first{};   // AdamW: of the gradient; SGD: the momentum
  Moment second{};  // AdamW: of its square

  // If given, updates set the marks of weights whose bits change (below). They
  // begin with the block of the first element, which neighbouring spans of one memory share.
  uint16_t* marks = nullptr;

  int64_t numel = 0;
  int64_t flat_begin = 0;  // of the first element, in the group's whole buffer
  uint64_t group = 0;      // tells groups apart where random numbers are drawn

  float rate_scale = 1.0f;  // times the learning rate
  float weight_decay = 0.0f;
  int64_t num_missed = 0;  // updates of the optimizer that left these elements out
};

inline FlatRange flat_range(const UpdateSpan& span) {
  return {span.flat_begin, span.flat_begin + span.numel};
}

// Elements [begin, begin + numel) of a span, as a span. If it has scales, `begin` must lie between
// two blocks of them.
UpdateSpan part_of_span(const UpdateSpan& span, int64_t begin, int64_t numel);

// --- marks of changed weights --------------------------------------------------------------------

// One bit per element, set by updates and read by patches.
//
// Elements are counted by their flat positions. A block of kScaleBlock elements has kMarkLanes
// numbers of 16 bits: bit j of number k is element 8 j + k, so that vectors of a CPU collect bits
// without moving them from lane to lane. Threads and warps take whole blocks, so nobody else writes
// the numbers that they change.
inline constexpr int64_t kMarkLanes = 8;
static_assert(kMarkLanes * 16 == kScaleBlock);

// Numbers of the blocks that a range touches.
inline int64_t num_mark_lanes(FlatRange flat) { return num_scales(flat) * kMarkLanes; }

// The first number of a position's block, in memory that begins with the block of `begin`.
constexpr int64_t first_mark_lane(int64_t begin, int64_t position) {
  return (position / kScaleBlock - begin / kScaleBlock) * kMarkLanes;
}

// Appends the marked ones of elements [flat) to `positions`, ascending. `marks` is memory that
// begins with the block of `begin`.
void find_marked(const uint16_t* marks, int64_t begin, FlatRange flat,
                 std::vector<int64_t>& positions);

}  // namespace fsdp
