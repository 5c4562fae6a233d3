#include "fsdp/memory/double_buffer.h"

#include <algorithm>

#include "fsdp/base/integer.h"

namespace fsdp {

namespace {

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
