// memory/: every kind of pool on random models and steps, as an engine would use them.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <set>
#include <utility>

#include "fsdp/base/check.h"
#include "fsdp/memory/bucket_pool.h"
#include "support/counting_allocator.h"
#include "support/random_units.h"

namespace fsdp::pool_property_test {
namespace {

using testing::CountingAllocator;
using testing::RandomModel;

struct Observed {
  std::vector<void*> addresses;  // in the order of acquire
  int64_t num_overlaps = 0;
};

// The live buckets by address: finds overlaps without knowing how any pool works.
class LiveRanges {
 public:
  bool add(void* address, int64_t bytes) {
    if (bytes == 0) return true;
    const auto begin = reinterpret_cast<uintptr_t>(address);
    const auto above = ranges_.lower_bound(begin);
    const bool free_above =
        above == ranges_.end() || begin + static_cast<uintptr_t>(bytes) <= above->first;
    const bool free_below = above == ranges_.begin() || std::prev(above)->second <= begin;
    ranges_[begin] = begin + static_cast<uintptr_t>(bytes);
    return free_above && free_below;
  }
  void remove(void* address, int64_t bytes) {
    if (bytes > 0) ranges_.erase(reinterpret_cast<uintptr_t>(address));
  }

 private:
  std::map<uintptr_t, uintptr_t> ranges_;
};

// One step along the pool's trace; releases of one time come in any order.
Observed run_step(BucketPool& pool, RandomModel& random) {
  Observed observed;
  LiveRanges live;
  std::map<BucketId, void*> address_of;
  pool.begin_step();
  const LiveTrace& trace = pool.trace();
  for (int32_t time = 0; time <= trace.num_times; ++time) {
    std::vector<const LiveInterval*> ended;
    for (const LiveInterval& each : trace.intervals) {
      if (each.last == time - 1) ended.push_back(&each);
    }
    for (size_t i = ended.size(); i-- > 1;) {
      std::swap(ended[i], ended[static_cast<size_t>(random.between(0, static_cast<int32_t>(i)))]);
    }
    for (const LiveInterval* each : ended) {
      live.remove(address_of[each->bucket], each->bytes);
      pool.release(each->bucket);
    }
    for (const LiveInterval& each : trace.intervals) {
      if (each.first != time) continue;
      void* const address = address_of[each.bucket] = pool.acquire(each.bucket);
      observed.addresses.push_back(address);
      observed.num_overlaps += live.add(address, each.bytes) ? 0 : 1;
    }
  }
  return observed;
}

// A step that fails halfway leaves no trace.
void abandon_step(BucketPool& pool, RandomModel& random) {
  pool.begin_step();
  const LiveTrace& trace = pool.trace();
  const int32_t fails_at = random.between(0, trace.num_times - 1);
  for (int32_t time = 0; time <= fails_at; ++time) {
    for (const LiveInterval& each : trace.intervals)
      if (each.last == time - 1) pool.release(each.bucket);
    for (const LiveInterval& each : trace.intervals)
      if (each.first == time) pool.acquire(each.bucket);
  }
  pool.cancel_step();
}

StepOrder any_order(RandomModel& random, const std::vector<UnitBuckets>& units) {
  const auto num_units = static_cast<int32_t>(units.size());
  return random.between(0, 1) == 0 ? random.order(num_units) : random.nested_order(num_units);
}

PoolOptions random_options(RandomModel& random, PoolKind kind, const StepOrder& order) {
  return {
      .kind = kind,
      .prefetch = random.between(0, 4),
      .other_units = random.between(0, 1) == 0 ? OtherUnits::kOnDemand : OtherUnits::kPersistent,
      .on_move = OnMove::kRefuse,
      .order = order,
      .alignment = int64_t{1} << random.between(0, 8)};
}

TEST(PoolProperties, NoOverlapsStableAddressesAndBytesAsForecast) {
  for (uint32_t seed = 0; seed < 500; ++seed) {
    for (const PoolKind kind : all_pool_kinds()) {
      RandomModel random(seed);
      const std::vector<UnitBuckets> units = random.units(10, random.between(0, 1) == 0 ? 1 : 32);
      const StepOrder order = any_order(random, units);
      const PoolOptions options = random_options(random, kind, order);
      CountingAllocator allocator;
      const auto pool = make_bucket_pool(units, options, allocator);
      const PoolBytes forecast = pool->bytes();
      ASSERT_EQ(allocator.num_allocations(), 0);

      std::vector<Observed> steps;
      for (int step = 0; step < 3; ++step) {
        steps.push_back(run_step(*pool, random));
        abandon_step(*pool, random);
      }
      const std::string where = concat("seed ", seed, " ", name_of(kind));
      for (const Observed& step : steps) ASSERT_EQ(step.num_overlaps, 0) << where;
      ASSERT_EQ(allocator.peak_bytes(), forecast.total()) << where;
      ASSERT_EQ(allocator.live_bytes(), forecast.fixed()) << where;
      const bool promised = kind == PoolKind::kMaxPool || kind == PoolKind::kPlanned;
      ASSERT_TRUE(pool->addresses_are_fixed() || !promised) << where;
      if (pool->addresses_are_fixed()) {
        ASSERT_EQ(steps[1].addresses, steps[0].addresses) << where;
        ASSERT_EQ(steps[2].addresses, steps[0].addresses) << where;
      }
      for (void* address : steps[0].addresses) {
        ASSERT_EQ(reinterpret_cast<uintptr_t>(address) % static_cast<uintptr_t>(options.alignment),
                  0u)
            << where;
      }
    }
  }
}

// Operations without any plan behind them: a step that is not the recorded one.
TEST(PoolProperties, CanAcquireSaysWhetherAcquireThrows) {
  int64_t num_refused = 0;
  for (uint32_t seed = 0; seed < 150; ++seed) {
    for (const PoolKind kind : all_pool_kinds()) {
      RandomModel random(seed);
      const std::vector<UnitBuckets> units = random.units(6, 32);
      PoolOptions options = random_options(random, kind, any_order(random, units));
      options.prefetch = random.between(0, 2);
      options.on_move = random.between(0, 1) == 0 ? OnMove::kRefuse : OnMove::kFollow;
      CountingAllocator allocator;
      const auto pool = make_bucket_pool(units, options, allocator);
      std::set<BucketId> held;
      for (int i = 0; i < 120; ++i) {
        const BucketId id = pool->table().id_of(random.between(0, pool->table().num_buckets() - 1));
        const std::string where = concat("seed ", seed, " ", name_of(kind), " operation ", i, " ",
                                         pool->table().text(id));
        if (held.contains(id) && random.between(0, 3) > 0) {
          pool->release(id);
          held.erase(id);
        } else if (random.between(0, 19) == 0) {
          pool->cancel_step();
          held.clear();
          ASSERT_NO_THROW(pool->begin_step()) << where;
        } else {
          const bool expected = pool->can_acquire(id);
          bool acquired = true;
          try {
            pool->acquire(id);
          } catch (const Error&) {
            acquired = false;
          }
          ASSERT_EQ(expected, acquired) << where;
          if (acquired) held.insert(id);
          num_refused += kind != PoolKind::kOnDemand && !acquired ? 1 : 0;
        }
      }
    }
  }
  EXPECT_GT(num_refused, 3000) << "slots and arenas were full at times";
}

}  // namespace
}  // namespace fsdp::pool_property_test
