// What an optimizer's state takes on the device and on the host: engine and forecast count it here,
// so they agree.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "fsdp/layout/flat_layout.h"
#include "fsdp/layout/group_types.h"

namespace fsdp {

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
