// memory/live_trace.h: steps in which units begin while others still compute.
#include "fsdp/memory/live_trace.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <set>

#include "fsdp/base/check.h"
#include "fsdp/memory/bucket_pool.h"
#include "support/counting_allocator.h"
#include "support/random_units.h"
#include "support/small_transformer.h"

namespace fsdp::step_order_test {
namespace {

using testing::block;
using testing::CountingAllocator;
using ::testing::ElementsAre;
using ::testing::IsEmpty;
using testing::RandomModel;

using UnitSet = std::set<int32_t>;

BucketTable blocks(int32_t num_units) {
  std::vector<UnitBuckets> units;
  for (int32_t i = 0; i < num_units; ++i) units.push_back(block(concat("unit", i), 64));
  return BucketTable(std::move(units));
}

UnitSet live_units(const LiveTrace& trace, const BucketTable& table, BucketRole role,
                   int32_t time) {
  UnitSet units;
  for (const LiveInterval& each : trace.intervals) {
    if (table.bucket(each.bucket).role == role && each.first <= time && time <= each.last)
      units.insert(each.bucket.unit);
  }
  return units;
}

// Along the pool's trace, as an engine goes.
void run_step(BucketPool& pool) {
  pool.begin_step();
  const LiveTrace& trace = pool.trace();
  for (int32_t time = 0; time <= trace.num_times; ++time) {
    for (const LiveInterval& each : trace.intervals)
      if (each.last == time - 1) pool.release(each.bucket);
    for (const LiveInterval& each : trace.intervals)
      if (each.first == time) pool.acquire(each.bucket);
  }
}

// An embedding, layers, a multi-token-prediction layer that calls the embedding itself, a head.
enum MtpUnit : int32_t { kEmbedding, kLayer0, kLayer1, kLayer2, kMtp, kHead };

std::vector<UnitBuckets> mtp_units() {
  return {block("embedding", 2048), block("layers.0", 1024), block("layers.1", 1024),
          block("layers.2", 1024),  block("mtp", 1536),      block("head", 4096)};
}

StepOrder mtp_order() {
  return mirrored_order({kEmbedding, kLayer0, kLayer1, kLayer2, kMtp, kEmbedding, kHead},
                        {0, 1, 2, 3, 5, 5, 6});
}

TEST(MirroredOrder, BeginsWithTheUseThatEndedLast) {
  const StepOrder order = mtp_order();
  EXPECT_THAT(order.backward,
              ElementsAre(kHead, kMtp, kEmbedding, kLayer2, kLayer1, kLayer0, kEmbedding));
  EXPECT_THAT(order.ends, ElementsAre(0, 1, 2, 3, 5, 5, 6, 7, 9, 9, 10, 11, 12, 13));
  EXPECT_THAT(mirrored_order({0, 1, 2}).backward, ElementsAre(2, 1, 0));
  EXPECT_THAT(mirrored_order({0, 1, 2}).ends, IsEmpty());
}

TEST(NestedUses, GoThroughEveryPoolWithTwoSlots) {
  for (const PoolKind kind : all_pool_kinds()) {
    CountingAllocator allocator;
    const auto pool = make_bucket_pool(
        mtp_units(),
        {.kind = kind, .prefetch = 1, .on_move = OnMove::kRefuse, .order = mtp_order()}, allocator);
    for (int step = 0; step < 3; ++step) EXPECT_NO_THROW(run_step(*pool)) << name_of(kind);
    EXPECT_EQ(allocator.peak_bytes(), pool->bytes().total()) << name_of(kind);
    if (kind == PoolKind::kMaxPool) {
      EXPECT_EQ(pool->bytes().weight, 2 * 4096);
    }
  }
}

TEST(NestedUses, WithoutPrefetchAddOnlyTheNestedUnit) {
  const BucketTable table(mtp_units());
  const LiveTrace trace = zero3_trace(table, mtp_order(), 0);
  const auto live = [&](int32_t time) {
    return live_units(trace, table, BucketRole::kWeight, time);
  };
  EXPECT_EQ(live(4), UnitSet{kMtp}) << "the embedding comes when it is called";
  EXPECT_EQ(live(5), (UnitSet{kMtp, kEmbedding}));
  EXPECT_EQ(live(6), UnitSet{kHead});
  EXPECT_EQ(most_live_units(trace, table, BucketRole::kWeight), 2);
  CountingAllocator allocator;
  const auto pool = make_bucket_pool(
      mtp_units(), {.kind = PoolKind::kMaxPool, .prefetch = 0, .order = mtp_order()}, allocator);
  EXPECT_EQ(pool->bytes().weight, 2 * 4096)
      << "one more slot than prefetch + 1, for the nested use";
  EXPECT_NO_THROW(run_step(*pool));
}

TEST(NestedUses, GetTheGradientSlotsTheyNeed) {
  // Three units nested in each other, none of which is used again: all gradients at once.
  const BucketTable table = blocks(3);
  const StepOrder order = mirrored_order({0, 1, 2}, {2, 2, 2});
  const LiveTrace trace = zero3_trace(table, order, 1);
  EXPECT_EQ(most_live_units(trace, table, BucketRole::kGradient), 3);
  CountingAllocator allocator;
  const auto pool =
      make_bucket_pool({table.units().begin(), table.units().end()}, {.order = order}, allocator);
  EXPECT_EQ(pool->bytes().gradient, 3 * 128);
  EXPECT_EQ(pool->bytes().weight, 3 * 128) << "aligned to 128 bytes";
  EXPECT_NO_THROW(run_step(*pool));
}

// From the words of Note [ZeRO-3 live intervals], one time after the other.
struct Simulated {
  std::vector<UnitSet> weights;
  std::vector<UnitSet> gradients;
  std::vector<size_t> depths;  // units that compute
};

Simulated simulate(const StepOrder& order, int32_t prefetch) {
  std::vector<int32_t> uses = order.forward;
  uses.insert(uses.end(), order.backward.begin(), order.backward.end());
  const auto num_uses = static_cast<int32_t>(uses.size());
  const auto num_forward = static_cast<int32_t>(order.forward.size());
  const auto unit_at = [&](int32_t use) { return uses[static_cast<size_t>(use)]; };
  const auto end_of = [&](int32_t use) {
    return order.ends.empty() ? use : order.ends[static_cast<size_t>(use)];
  };
  Simulated result;
  for (int32_t time = 0; time <= num_uses; ++time) {
    UnitSet computing;
    for (int32_t use = 0; use <= time && use < num_uses; ++use)
      if (end_of(use) >= time) computing.insert(unit_at(use));
    UnitSet weights = computing;
    const int32_t window = prefetch + 1 - static_cast<int32_t>(computing.size());
    for (int32_t i = 1; time < num_uses && i <= window && time + i < num_uses; ++i)
      weights.insert(unit_at(time + i));
    UnitSet gradients;
    for (int32_t unit : uses) {
      int32_t begins = -1;
      int32_t ends = -1;
      for (int32_t use = num_forward; use < num_uses; ++use) {
        if (unit_at(use) != unit) continue;
        begins = use;
        ends = std::max(ends, end_of(use) + 1);
      }
      if (begins >= 0 && begins <= time && time <= ends) gradients.insert(unit);
    }
    result.depths.push_back(computing.size());
    result.weights.push_back(std::move(weights));
    result.gradients.push_back(std::move(gradients));
  }
  return result;
}

// Each stay is as long as it can be: a unit does not leave and come back at the next time.
int64_t num_broken_stays(const LiveTrace& trace) {
  int64_t count = 0;
  for (const LiveInterval& a : trace.intervals)
    for (const LiveInterval& b : trace.intervals)
      count += a.bucket == b.bucket && a.last + 1 == b.first ? 1 : 0;
  return count;
}

TEST(NestedUses, AreLiveAsASimulationSays) {
  int64_t num_nested = 0;
  for (uint32_t seed = 0; seed < 1000; ++seed) {
    RandomModel random(seed);
    const BucketTable table = blocks(random.between(1, 8));
    StepOrder order;
    for (std::vector<int32_t>* pass : {&order.forward, &order.backward}) {
      const int32_t num_uses = random.between(0, 10);
      for (int32_t i = 0; i < num_uses; ++i)
        pass->push_back(random.between(0, table.num_units() - 1));
    }
    const auto num_forward = static_cast<int32_t>(order.forward.size());
    const auto num_uses = num_forward + static_cast<int32_t>(order.backward.size());
    if (random.between(0, 4) > 0) {
      order.ends = random.nested_ends(0, num_forward - 1);
      for (const int32_t end : random.nested_ends(num_forward, num_uses - 1))
        order.ends.push_back(end);
    }
    const int32_t prefetch = random.between(0, 4);
    const LiveTrace trace = zero3_trace(table, order, prefetch);
    const Simulated expected = simulate(order, prefetch);
    ASSERT_EQ(trace.num_times, num_uses + 1) << "seed " << seed;
    for (int32_t time = 0; time < trace.num_times; ++time) {
      const auto t = static_cast<size_t>(time);
      const UnitSet weights = live_units(trace, table, BucketRole::kWeight, time);
      ASSERT_EQ(weights, expected.weights[t]) << "seed " << seed << " time " << time;
      ASSERT_EQ(live_units(trace, table, BucketRole::kGradient, time), expected.gradients[t])
          << "seed " << seed << " time " << time;
      ASSERT_LE(weights.size(), std::max(static_cast<size_t>(prefetch) + 1, expected.depths[t]));
      num_nested += expected.depths[t] > 1 ? 1 : 0;
    }
    ASSERT_EQ(num_broken_stays(trace), 0) << "seed " << seed;
  }
  EXPECT_GT(num_nested, 500) << "the orders are nested at all";
}

}  // namespace
}  // namespace fsdp::step_order_test
