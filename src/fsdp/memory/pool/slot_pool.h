// A pool of equal slots, each of which takes one unit at a time; what a slot looks like is a
// layout.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "fsdp/memory/bucket_pool.h"
#include "fsdp/memory/live_trace.h"

namespace fsdp {

struct SlotOptions {
  // Units of each role (weight, gradient) that may be live at once.
  std::array<int32_t, kNumBucketRoles> num_slots = {2, 2};
  OnMove on_move = OnMove::kFollow;
  int64_t alignment = 128;
};

// Slots by role: prefetch + 1 for weights and `gradient_slots` for gradients, and more where nested
// uses keep more units live at once (Note [ZeRO-3 live intervals]).
std::array<int32_t, kNumBucketRoles> num_slots_for(const BucketTable& table, const LiveTrace& trace,
                                                   int32_t prefetch, int32_t gradient_slots);

// One place in every slot of a role.
struct SlotEntry {
  BucketRole role = BucketRole::kWeight;
  DType dtype = DType::kBFloat16;
  int64_t bytes = 0;   // aligned
  int64_t offset = 0;  // from the beginning of the slot
  BucketId set_by;     // the first bucket that needs all of it
};

// Where a bucket lives.
struct BucketHome {
  enum class Place : uint8_t { kSlot, kPersistent, kOnDemand };
  Place place = Place::kOnDemand;
  int32_t entry = -1;  // kSlot: into SlotLayout::entries
  int64_t offset = 0;  // kPersistent: from the beginning of the persistent memory
};

struct SlotLayout {
  PoolKind kind = PoolKind::kMaxPool;
  std::vector<SlotEntry> entries;
  std::vector<BucketHome> homes;  // by flat index of the bucket
  std::array<int64_t, kNumBucketRoles> slot_bytes = {};
  std::array<int64_t, kNumBucketRoles> persistent_bytes = {};
  int32_t num_units_in_slots = 0;
};

// Appends an entry behind the others of its role and returns its index.
int32_t add_entry(SlotLayout& layout, SlotEntry entry, int64_t alignment);

// `trace` gives the peak of what is allocated on demand.
std::unique_ptr<BucketPool> make_slot_pool(BucketTable table, SlotLayout layout,
                                           const SlotOptions& options, LiveTrace trace,
                                           SlabAllocator& allocator);

}  // namespace fsdp
