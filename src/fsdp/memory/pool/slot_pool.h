// A pool of equal slots, each of which takes one unit at a time; what a slot looks like is a
// layout.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "fsdp/memory/bucket.h"
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

// Slots without entries: every bucket is allocated while it is held.
SlotLayout on_demand_layout(const BucketTable& table);

// A slot that fits any unit of the model with the fewest bytes. Per role and dtype the i-th largest
// entry is as large as the i-th largest bucket of any unit. That is the smallest multiset of
// entries into which the buckets of every single unit can be matched one to one, and matching by
// rank of size is such a match: a unit's i-th largest bucket needs i entries of at least its size,
// so no i-th largest entry can be smaller.
SlotLayout max_pool_layout(const BucketTable& table, const SlotOptions& options);

// A slot made for the most common unit of the model; the others get what `other_units` says. Two
// units are alike when they have the same number of buckets with pairwise equal role, dtype and
// bytes. The largest set of units that are alike uses the slots; of equally large sets the one
// declared first.
SlotLayout double_buffer_layout(const BucketTable& table, OtherUnits other_units,
                                const SlotOptions& options);

}  // namespace fsdp
