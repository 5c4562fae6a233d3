// memory/: the smallest slot that fits any unit.
#include "fsdp/memory/pool/slot_pool.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <functional>
#include <limits>

#include "support/counting_allocator.h"
#include "support/random_units.h"

namespace fsdp::max_pool_test {
namespace {

using ::testing::AllOf;
using testing::CountingAllocator;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using testing::RandomModel;

Bucket weight(const std::string& name, int64_t bytes, DType dtype = DType::kBFloat16) {
  return {name, bytes, dtype, BucketRole::kWeight};
}

std::vector<int64_t> entry_bytes(const SlotLayout& layout, DType dtype) {
  std::vector<int64_t> bytes;
  for (const SlotEntry& entry : layout.entries) {
    if (entry.dtype == dtype) bytes.push_back(entry.bytes);
  }
  return bytes;
}

// Can the buckets be put into different entries, each at least as large? Tries every way.
bool fits(std::vector<int64_t> buckets, std::vector<int64_t> entries) {
  if (buckets.empty()) return true;
  const int64_t bucket = buckets.back();
  buckets.pop_back();
  for (size_t i = 0; i < entries.size(); ++i) {
    if (entries[i] < bucket) continue;
    std::vector<int64_t> rest = entries;
    rest.erase(rest.begin() + static_cast<std::ptrdiff_t>(i));
    if (fits(buckets, rest)) return true;
  }
  return false;
}

// The fewest bytes of any multiset of at most `max_entries` entries that fits every unit. Entries
// larger than needed by some bucket are never of use, so bucket sizes are enough to try.
int64_t smallest_by_brute_force(const std::vector<std::vector<int64_t>>& units,
                                size_t max_entries) {
  std::vector<int64_t> sizes;
  for (const auto& unit : units) sizes.insert(sizes.end(), unit.begin(), unit.end());
  std::sort(sizes.begin(), sizes.end());
  sizes.erase(std::unique(sizes.begin(), sizes.end()), sizes.end());
  int64_t best = std::numeric_limits<int64_t>::max();
  std::vector<int64_t> entries;
  const std::function<void(size_t, int64_t)> extend = [&](size_t first, int64_t bytes) {
    if (bytes >= best) return;
    if (std::all_of(units.begin(), units.end(),
                    [&](const auto& unit) { return fits(unit, entries); })) {
      best = bytes;
      return;
    }
    if (entries.size() == max_entries) return;
    for (size_t i = first; i < sizes.size(); ++i) {
      entries.push_back(sizes[i]);
      extend(i, bytes + sizes[i]);
      entries.pop_back();
    }
  };
  extend(0, 0);
  return best;
}

TEST(MaxPool, IsTheSmallestMultisetThatFitsEveryUnit) {
  for (uint32_t seed = 0; seed < 400; ++seed) {
    RandomModel random(seed);
    std::vector<std::vector<int64_t>> sizes(static_cast<size_t>(random.between(1, 4)));
    std::vector<UnitBuckets> units;
    size_t max_entries = 0;
    for (auto& unit : sizes) {
      units.push_back({"unit" + std::to_string(units.size()), {}});
      const int32_t num_buckets = random.between(0, 4);
      for (int32_t i = 0; i < num_buckets; ++i) {
        unit.push_back(2 * random.between(1, 5));
        units.back().buckets.push_back(weight("bucket" + std::to_string(i), unit.back()));
      }
      max_entries = std::max(max_entries, unit.size());
    }
    const SlotLayout layout = max_pool_layout(BucketTable(units), {.alignment = 1});
    ASSERT_EQ(layout.slot_bytes[0], smallest_by_brute_force(sizes, max_entries)) << "seed " << seed;
  }
}

// The case the pool exists for: units with different numbers, sizes and types of buckets.
TEST(MaxPool, FitsAsymmetricUnits) {
  const BucketTable table({
      {"mamba", {weight("mixer", 600), weight("norm", 100), weight("state", 300, DType::kFloat32)}},
      {"attention", {weight("qkv", 400), weight("out", 300), weight("norm", 100)}},
      {"experts", {weight("router", 200), weight("experts", 900)}},
  });
  const SlotLayout layout = max_pool_layout(table, {.alignment = 1});
  EXPECT_THAT(entry_bytes(layout, DType::kBFloat16), ElementsAre(900, 300, 100));
  EXPECT_THAT(entry_bytes(layout, DType::kFloat32), ElementsAre(300));
  EXPECT_EQ(layout.slot_bytes[0], 900 + 300 + 100 + 300);
  EXPECT_EQ(layout.num_units_in_slots, 3);
  // Every bucket fits its entry and no two buckets of a unit share one.
  for (int32_t a = 0; a < table.num_buckets(); ++a) {
    const int32_t entry = layout.homes[static_cast<size_t>(a)].entry;
    EXPECT_GE(layout.entries[static_cast<size_t>(entry)].bytes, table.bucket(a).bytes);
    EXPECT_EQ(layout.entries[static_cast<size_t>(entry)].dtype, table.bucket(a).dtype);
    for (int32_t b = 0; b < a; ++b) {
      if (table.id_of(a).unit != table.id_of(b).unit) continue;
      EXPECT_NE(entry, layout.homes[static_cast<size_t>(b)].entry);
    }
  }
}

// In a process of its own: the level of the log is read once.
TEST(MaxPool, SaysInTheLogWhoSetEachMaximum) {
  ::testing::FLAGS_gtest_death_test_style = "threadsafe";
  EXPECT_EXIT(
      {
        ::setenv("FSDP_LOG", "debug", 1);
        CountingAllocator allocator;
        make_bucket_pool({{"mamba", {weight("mixer", 640)}},
                          {"mlp", {weight("up", 1280), weight("down", 512)}},
                          {"late", {weight("up", 1280)}}},
                         {.kind = PoolKind::kMaxPool}, allocator)
            ->reserve();
        std::exit(0);
      },
      ::testing::ExitedWithCode(0),
      AllOf(HasSubstr("weight: 2 slots of 1792 B"),
            HasSubstr("bf16 1280 B, set by unit 'mlp' bucket 'up'"),
            HasSubstr("bf16 512 B, set by unit 'mlp' bucket 'down'")));
}

// Planned with the sizes memory is really taken at, and taken once: no view is ever orphaned by a
// pool that grows.
TEST(MaxPool, TakesItsMemoryOnceAtThePaddedSizes) {
  CountingAllocator allocator;
  const auto pool = make_bucket_pool(
      {{"small", {weight("w", 200)}}, {"large", {weight("w", 3000)}}, {"mid", {weight("w", 1000)}}},
      {.kind = PoolKind::kMaxPool}, allocator);
  EXPECT_EQ(pool->bytes().weight, 2 * 3072);  // 3000 rounded up to the alignment of 128
  void* small = pool->acquire({0, 0});
  void* large = pool->acquire({1, 0});
  pool->release({0, 0});
  EXPECT_EQ(pool->acquire({2, 0}), small);
  EXPECT_NE(large, small);
  EXPECT_EQ(allocator.num_allocations(), 1);
  EXPECT_EQ(allocator.peak_bytes(), pool->bytes().total());
}

}  // namespace
}  // namespace fsdp::max_pool_test
