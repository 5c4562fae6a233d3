#include "fsdp/memory/pool/slot_layout.h"

#include <algorithm>

#include "fsdp/base/integer.h"

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

bool alike(const UnitBuckets& a, const UnitBuckets& b) {
  return std::equal(a.buckets.begin(), a.buckets.end(), b.buckets.begin(), b.buckets.end(),
                    [](const Bucket& x, const Bucket& y) {
                      return x.role == y.role && x.dtype == y.dtype && x.bytes == y.bytes;
                    });
}

// The first unit of the largest set, and the size of that set.
std::pair<int32_t, int32_t> most_common_unit(const BucketTable& table) {
  std::vector<std::pair<int32_t, int32_t>> sets;  // first unit, units in it
  for (int32_t unit = 0; unit < table.num_units(); ++unit) {
    const auto same = std::find_if(sets.begin(), sets.end(), [&](const auto& set) {
      return alike(table.units()[static_cast<size_t>(set.first)],
                   table.units()[static_cast<size_t>(unit)]);
    });
    if (same == sets.end()) {
      sets.emplace_back(unit, 1);
    } else {
      ++same->second;
    }
  }
  if (sets.empty()) return {-1, 0};
  return *std::max_element(sets.begin(), sets.end(),
                           [](const auto& a, const auto& b) { return a.second < b.second; });
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

SlotLayout double_buffer_layout(const BucketTable& table, OtherUnits other_units,
                                const SlotOptions& options) {
  SlotLayout layout;
  layout.kind = PoolKind::kDoubleBuffer;
  layout.homes.resize(static_cast<size_t>(table.num_buckets()));
  const auto [common, num_alike] = most_common_unit(table);
  if (common < 0) return layout;
  layout.num_units_in_slots = num_alike;
  const UnitBuckets& common_unit = table.units()[static_cast<size_t>(common)];
  for (int32_t i = 0; i < static_cast<int32_t>(common_unit.buckets.size()); ++i) {
    const Bucket& bucket = common_unit.buckets[static_cast<size_t>(i)];
    add_entry(
        layout,
        {.role = bucket.role, .dtype = bucket.dtype, .bytes = bucket.bytes, .set_by = {common, i}},
        options.alignment);
  }
  int64_t persistent_offset = 0;
  for (int32_t index = 0; index < table.num_buckets(); ++index) {
    const BucketId id = table.id_of(index);
    BucketHome& home = layout.homes[static_cast<size_t>(index)];
    if (alike(common_unit, table.units()[static_cast<size_t>(id.unit)])) {
      home = {.place = BucketHome::Place::kSlot, .entry = id.bucket};
    } else if (other_units == OtherUnits::kPersistent) {
      const Bucket& bucket = table.bucket(id);
      const int64_t bytes = round_up(bucket.bytes, options.alignment);
      home = {.place = BucketHome::Place::kPersistent, .offset = persistent_offset};
      persistent_offset = checked_add(persistent_offset, bytes);
      layout.persistent_bytes[static_cast<size_t>(bucket.role)] += bytes;
    }
  }
  return layout;
}

}  // namespace fsdp
