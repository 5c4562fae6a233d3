#include "fsdp/memory/max_pool.h"

#include <algorithm>

namespace fsdp {

namespace {

// The unit's buckets of one role and dtype, largest first; equal ones in order of declaration.
std::vector<int32_t> ranked_buckets(const BucketTable& table, int32_t unit, BucketRole role,
                                    DType dtype) {
  const std::vector<Bucket>& buckets = table.units()[static_cast<size_t>(unit)].buckets;
  std::vector<int32_t> ranked;
  for (int32_t i = 0; i < static_cast<int32_t>(buckets.size()); ++i) {
    const Bucket& bucket = buckets[static_cast<size_t>(i)];
    if (bucket.role == role && bucket.dtype == dtype) ranked.push_back(i);
  }
  std::stable_sort(ranked.begin(), ranked.end(), [&](int32_t a, int32_t b) {
    return buckets[static_cast<size_t>(a)].bytes > buckets[static_cast<size_t>(b)].bytes;
  });
  return ranked;
}

void add_entries(const BucketTable& table, BucketRole role, DType dtype, int64_t alignment,
                 SlotLayout& layout) {
  std::vector<SlotEntry> entries;
  for (int32_t unit = 0; unit < table.num_units(); ++unit) {
    const std::vector<int32_t> ranked = ranked_buckets(table, unit, role, dtype);
    for (size_t rank = 0; rank < ranked.size(); ++rank) {
      const BucketId id{unit, ranked[rank]};
      const int64_t bytes = table.bucket(id).bytes;
      if (rank == entries.size()) {
        entries.push_back({.role = role, .dtype = dtype, .bytes = bytes, .set_by = id});
      } else if (entries[rank].bytes < bytes) {
        entries[rank].bytes = bytes;
        entries[rank].set_by = id;
      }
    }
  }
  const auto first = static_cast<int32_t>(layout.entries.size());
  for (const SlotEntry& entry : entries) add_entry(layout, entry, alignment);
  for (int32_t unit = 0; unit < table.num_units(); ++unit) {
    const std::vector<int32_t> ranked = ranked_buckets(table, unit, role, dtype);
    for (int32_t rank = 0; rank < static_cast<int32_t>(ranked.size()); ++rank) {
      const int32_t index = table.index_of({unit, ranked[static_cast<size_t>(rank)]});
      layout.homes[static_cast<size_t>(index)] = {.place = BucketHome::Place::kSlot,
                                                  .entry = first + rank};
    }
  }
}

}  // namespace

SlotLayout max_pool_layout(const BucketTable& table, const SlotOptions& options) {
  SlotLayout layout;
  layout.kind = PoolKind::kMaxPool;
  layout.homes.resize(static_cast<size_t>(table.num_buckets()));
  layout.num_units_in_slots = table.num_units();
  for (const BucketRole role : {BucketRole::kWeight, BucketRole::kGradient}) {
    for (const DType dtype : all_dtypes()) {
      add_entries(table, role, dtype, options.alignment, layout);
    }
  }
  return layout;
}

}  // namespace fsdp
