// Bytes of quantised weights and of an optimizer's state on the device and on the host: engine and
// forecast count it here, so they agree.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "fsdp/base/compiler.h"
#include "fsdp/base/weight_recipe.h"
#include "fsdp/layout/flat_layout.h"
#include "fsdp/layout/group_types.h"

namespace fsdp {

// Scales of four bytes of one matrix: which one an element has, and how many there are.
struct SharedScales {
  int64_t block_rows = 1;
  int64_t block_columns = 1;
  int64_t per_row = 1;  // blocks side by side
  int64_t count = 0;

  FSDP_HOST_DEVICE int64_t index_of(int64_t row, int64_t column) const {
    return row / block_rows * per_row + column / block_columns;
  }
};

// kMxFp8 and kPlain: none.
SharedScales shared_scales(WeightRecipe recipe, int64_t rows, int64_t columns);

// How many a buffer has room for: those of the next matrix begin where GPUs can read them.
constexpr int64_t padded_count(const SharedScales& scales) { return (scales.count + 3) / 4 * 4; }

// A rank keeps three numbers for every shared scale: its amax, the factor of numbers, the scale of
// codes.
inline constexpr int64_t kSharedScaleBytes = 3 * 4;

// The weights of so many elements: numbers of their type, or codes and scales of one byte. Every
// range that begins and ends aligned has a whole number of both.
int64_t code_bytes(const GroupTypes& types, int64_t numel);
int64_t block_scale_bytes(const GroupTypes& types, int64_t numel);
int64_t weight_bytes(const GroupTypes& types, int64_t numel);

// Types whose range is too narrow for moments: those have one fp32 scale per kScaleBlock elements.
constexpr bool is_scaled(DType dtype) {
  return dtype == DType::kFloat16 || dtype == DType::kFloat8E4M3 || dtype == DType::kFloat8E5M2;
}

// Scales and random numbers belong to places in the group's whole buffer, so that the same element
// has the same ones however it is sharded. Only a block that is cut by a shard's end has two
// scales.
inline constexpr int64_t kScaleBlock = 128;

// How many elements of a shard have their state on the host: that fraction of them, to the nearest
// whole element (0.29 of 100 is 29, though the product of the two doubles is a little less).
int64_t offloaded_numel(int64_t shard_numel, double fraction);

// A shard's ranges by where the state of their elements is; local_begin still counts from the
// shard's begin.
struct StatePlaces {
  std::vector<ShardRange> device;  // the shard's first elements
  std::vector<ShardRange> host;    // its last offloaded_numel()
};
StatePlaces state_places(std::span<const ShardRange> shard, double offload_fraction);

int64_t numel_of(std::span<const ShardRange> ranges);

// Scales of a moment over a contiguous range: one for each block that the range touches.
int64_t num_scales(FlatRange flat);

// A moment's values and, where it needs them, its scales.
int64_t moment_bytes(DType dtype, FlatRange flat);

// All moments of these elements.
int64_t moments_bytes(const GroupTypes& types, std::span<const ShardRange> ranges);

// A bit for each of these elements, in whole blocks (StepOptions::marks_changes).
int64_t marks_bytes(std::span<const ShardRange> ranges);

// Bytes per element of the weight that is updated on the host. It is whole there, never split: the
// other half would be on the device. Without main weights it is a copy of the weight, so that only
// gradients travel to the host.
int64_t host_weight_bytes(const GroupTypes& types);

}  // namespace fsdp
