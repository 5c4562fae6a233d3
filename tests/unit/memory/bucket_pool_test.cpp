// memory/: the guarantees and the errors of pools.
#include "fsdp/memory/bucket_pool.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>

#include "fsdp/base/error.h"
#include "fsdp/memory/arena/prefetch_plan.h"
#include "fsdp/memory/pool/planned_pool.h"
#include "support/counting_allocator.h"
#include "support/small_transformer.h"

namespace fsdp::bucket_pool_test {
namespace {

using ::testing::AllOf;
using testing::block;
using testing::CountingAllocator;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using testing::small_transformer;
using testing::small_transformer_pool;
using ::testing::ThrowsMessage;
using ::testing::UnorderedElementsAre;

constexpr BucketRole kWeight = BucketRole::kWeight;
constexpr BucketRole kGradient = BucketRole::kGradient;

TEST(BucketPool, KnowsItsBytesBeforeItAllocatesAnything) {
  for (const PoolKind kind : all_pool_kinds()) {
    CountingAllocator allocator;
    const auto pool = small_transformer_pool({.kind = kind}, allocator);
    EXPECT_GT(pool->bytes().total(), 0) << name_of(kind);
    EXPECT_EQ(allocator.num_allocations(), 0) << name_of(kind);
    pool->reserve();
    EXPECT_EQ(allocator.peak_bytes(), pool->bytes().fixed()) << name_of(kind);
    EXPECT_EQ(pool->kind(), kind);
  }
}

TEST(BucketPool, GivesEverythingBackToTheAllocator) {
  for (const PoolKind kind : all_pool_kinds()) {
    CountingAllocator allocator;
    {
      const auto pool = small_transformer_pool({.kind = kind}, allocator);
      pool->acquire({0, 0});
      pool->acquire({1, 0});
      pool->release({0, 0});
    }
    EXPECT_EQ(allocator.live_bytes(), 0) << name_of(kind);
    EXPECT_EQ(allocator.num_wrong_frees(), 0) << name_of(kind);
  }
}

TEST(BucketPool, NamesUnitBucketAndStateWhenABucketIsAcquiredTwice) {
  for (const PoolKind kind : all_pool_kinds()) {
    CountingAllocator allocator;
    const auto pool = small_transformer_pool({.kind = kind}, allocator);
    pool->acquire({1, 0});
    EXPECT_THAT(
        [&] {
          pool->acquire({1, 0});
        },
        ThrowsMessage<Error>(AllOf(HasSubstr("unit 'layers.0' bucket 'weight'"),
                                   HasSubstr("acquired twice"), HasSubstr("("))))
        << name_of(kind);
    EXPECT_EQ(pool->num_held(), 1) << name_of(kind);
  }
}

TEST(BucketPool, NamesUnitBucketAndStateWhenSomethingNotHeldIsReleased) {
  for (const PoolKind kind : all_pool_kinds()) {
    CountingAllocator allocator;
    const auto pool = small_transformer_pool({.kind = kind}, allocator);
    EXPECT_THAT(
        [&] {
          pool->release({2, 1});
        },
        ThrowsMessage<Error>(AllOf(HasSubstr("unit 'layers.1' bucket 'gradient'"),
                                   HasSubstr("released but not held"))))
        << name_of(kind);
    pool->acquire({2, 1});
    pool->release({2, 1});
    EXPECT_THROW(pool->release({2, 1}), Error) << name_of(kind);
    EXPECT_THAT([&] { pool->address({2, 1}); }, ThrowsMessage<Error>(HasSubstr("is not held")));
  }
}

TEST(BucketPool, SaysBeforehandWhetherAcquireWouldSucceed) {
  CountingAllocator allocator;
  for (const PoolKind kind : all_pool_kinds()) {
    const auto pool = small_transformer_pool({.kind = kind}, allocator);
    pool->begin_step();
    EXPECT_TRUE(pool->can_acquire({1, 0})) << name_of(kind);
    pool->acquire({1, 0});
    EXPECT_FALSE(pool->can_acquire({1, 0})) << "held, " << name_of(kind);
    EXPECT_THROW(pool->can_acquire({9, 0}), Error);
    pool->cancel_step();
    EXPECT_FALSE(pool->is_held({1, 0})) << name_of(kind);
    EXPECT_NO_THROW(pool->begin_step()) << name_of(kind);
  }
  const auto slots = small_transformer_pool({.kind = PoolKind::kMaxPool}, allocator);
  slots->acquire({1, 0});
  slots->acquire({2, 0});
  EXPECT_FALSE(slots->can_acquire({3, 0})) << "both slots are taken";
  EXPECT_TRUE(slots->can_acquire({2, 1})) << "gradients have slots of their own";
  const auto planned = small_transformer_pool({.kind = PoolKind::kPlanned}, allocator);
  for (int use = 0; use < 2; ++use) {  // forward and backward
    planned->acquire({1, 0});
    planned->release({1, 0});
  }
  EXPECT_FALSE(planned->can_acquire({1, 0})) << "the plan has two stays for it";
  planned->begin_step();
  EXPECT_TRUE(planned->can_acquire({1, 0}));
}

TEST(BucketPool, RefusesIdsThatWereNeverDeclared) {
  CountingAllocator allocator;
  const auto pool = small_transformer_pool({}, allocator);
  EXPECT_THAT(
      [&] {
        pool->acquire({6, 0});
      },
      ThrowsMessage<Error>(AllOf(HasSubstr("unit 6"), HasSubstr("has 6 units"))));
  EXPECT_THAT(
      [&] {
        pool->acquire({0, 2});
      },
      ThrowsMessage<Error>(
          AllOf(HasSubstr("bucket 2 of unit 'embedding'"), HasSubstr("has 2 buckets"))));
  EXPECT_THROW(pool->release({-1, 0}), Error);
  EXPECT_THROW(pool->acquire({0, -1}), Error);
  EXPECT_THROW(pool->address_is_fixed({9, 9}), Error);
}

TEST(BucketPool, RefusesAChangedSizeOrTypeAtAcquire) {
  for (const PoolKind kind : all_pool_kinds()) {
    CountingAllocator allocator;
    const auto pool = small_transformer_pool({.kind = kind}, allocator);
    EXPECT_THAT(
        [&] {
          pool->acquire({1, 0}, 2048, DType::kBFloat16);
        },
        ThrowsMessage<Error>(AllOf(HasSubstr("unit 'layers.0' bucket 'weight'"),
                                   HasSubstr("declared with 1024 bytes of bf16"),
                                   HasSubstr("2048 bytes of bf16"))));
    EXPECT_THAT(
        [&] {
          pool->acquire({1, 0}, 1024, DType::kFloat16);
        },
        ThrowsMessage<Error>(HasSubstr("1024 bytes of fp16")));
    EXPECT_EQ(pool->num_held(), 0);
    pool->acquire({1, 0}, 1024, DType::kBFloat16);
    EXPECT_TRUE(pool->is_held({1, 0}));
  }
}

TEST(BucketPool, RefusesAChangedDeclarationNamingTheFirstDifference) {
  CountingAllocator allocator;
  const auto pool = small_transformer_pool({}, allocator);
  pool->require_same_declaration(small_transformer());
  const auto refuses = [&](auto change, const std::string& words) {
    std::vector<UnitBuckets> units = small_transformer();
    change(units);
    EXPECT_THAT([&] { pool->require_same_declaration(units); },
                ThrowsMessage<Error>(HasSubstr(words)));
  };
  refuses([](auto& units) { units[2].buckets[0].bytes = 512; },
          "unit 'layers.1' bucket 'weight' changed from 1024 to 512 bytes");
  refuses([](auto& units) { units[2].buckets[1].dtype = DType::kFloat16; },
          "bucket 'gradient' changed from fp32 to fp16");
  refuses([](auto& units) { units[0].buckets.pop_back(); }, "had 2 buckets and now has 1");
  refuses([](auto& units) { units.pop_back(); }, "6 units and is now declared with 5");
  refuses([](auto& units) { units[0].name = "wte"; }, "unit 0 was 'embedding' and is now 'wte'");
  refuses([](auto& units) { units[0].buckets[0].name = "w"; }, "had bucket 'weight'");
  refuses([](auto& units) { units[0].buckets[0].role = kGradient; }, "from weight to gradient");
}

TEST(BucketPool, RefusesDeclarationsThatMakeNoSense) {
  CountingAllocator allocator;
  const auto refuses = [&](std::vector<UnitBuckets> units, const std::string& words) {
    EXPECT_THAT([&] { make_bucket_pool(units, {}, allocator); },
                ThrowsMessage<Error>(HasSubstr(words)));
  };
  refuses({block("a", 128), block("a", 128)}, "unit 'a' is declared twice");
  refuses({block("a", -128)}, "has -128 bytes");
  refuses({block("a", 3)}, "no whole number of bf16 elements");
  UnitBuckets doubled = block("a", 128);
  doubled.buckets.push_back(doubled.buckets[0]);
  refuses({doubled}, "bucket 'weight' twice");
}

TEST(BucketPool, RefusesOptionsThatMakeNoSense) {
  CountingAllocator allocator;
  const auto refuses = [&](PoolOptions options, const std::string& words) {
    EXPECT_THAT([&] { small_transformer_pool(options, allocator); },
                ThrowsMessage<UsageError>(HasSubstr(words)));
  };
  refuses({.prefetch = -1}, "prefetch is -1");
  refuses({.gradient_slots = 0}, "gradient_slots is 0");
  refuses({.alignment = 96}, "alignment is 96; it must be a power of two");
  refuses({.kind = PoolKind::kPlanned, .budget_bytes = -5}, "budget_bytes is -5");
  refuses({.kind = PoolKind::kMaxPool, .budget_bytes = 5}, "without any prefetch");
}

TEST(BucketPool, RefusesToBeginAStepWhileSomethingIsHeld) {
  for (const PoolKind kind : all_pool_kinds()) {
    CountingAllocator allocator;
    const auto pool = small_transformer_pool({.kind = kind}, allocator);
    pool->acquire({3, 0});
    EXPECT_THAT([&] { pool->begin_step(); },
                ThrowsMessage<Error>(
                    AllOf(HasSubstr("1 buckets are still held"), HasSubstr("'layers.2'"))));
    pool->release({3, 0});
    pool->begin_step();
  }
}

TEST(BucketPool, TakesModelsWithoutUnitsAndEmptyBuckets) {
  for (const PoolKind kind : all_pool_kinds()) {
    CountingAllocator allocator;
    const auto none = make_bucket_pool({}, {.kind = kind}, allocator);
    none->reserve();
    EXPECT_EQ(none->bytes().total(), 0) << name_of(kind);
    const auto pool = make_bucket_pool({block("empty", 0), {"nothing", {}}, block("some", 128)},
                                       {.kind = kind}, allocator);
    pool->acquire({0, 0});
    pool->acquire({2, 0});
    pool->release({0, 0});
    pool->release({2, 0});
  }
}

TEST(BucketPool, KindsHaveNames) {
  for (const PoolKind kind : all_pool_kinds()) EXPECT_EQ(parse_pool_kind(name_of(kind)), kind);
  EXPECT_EQ(parse_pool_kind("arena"), std::nullopt);
}

TEST(OnDemandPool, TakesMemoryForAsLongAsItIsHeldAndPromisesNoAddress) {
  CountingAllocator allocator;
  const auto pool = small_transformer_pool({.kind = PoolKind::kOnDemand}, allocator);
  pool->acquire({0, 0});
  pool->acquire({1, 0});
  EXPECT_EQ(allocator.live_bytes(), 2048 + 1024);
  pool->release({0, 0});
  EXPECT_EQ(allocator.live_bytes(), 1024);
  EXPECT_FALSE(pool->addresses_are_fixed());
  EXPECT_FALSE(pool->address_is_fixed({1, 0}));
  EXPECT_THAT(pool->report(), HasSubstr("not fixed"));
  pool->release({1, 0});
}

TEST(PlannedPool, RefusesAnAddressThatALiveBucketHolds) {
  CountingAllocator allocator;
  const auto pool = small_transformer_pool({.kind = PoolKind::kPlanned}, allocator);
  // All units at once is more than the arena has, so somebody must be refused.
  std::string message;
  try {
    for (int32_t unit = 0; unit < 6; ++unit) {
      pool->acquire({unit, 0});
      pool->acquire({unit, 1});
    }
  } catch (const Error& error) {
    message = error.what();
  }
  EXPECT_THAT(message, AllOf(HasSubstr("of the arena"), HasSubstr("still holds"),
                             HasSubstr("plan again"), HasSubstr("live in the arena: unit ")));
}

TEST(PlannedPool, RefusesMoreUsesThanThePlanHas) {
  CountingAllocator allocator;
  const auto pool = small_transformer_pool({.kind = PoolKind::kPlanned}, allocator);
  for (int visit = 0; visit < 2; ++visit) {  // forward and backward
    pool->acquire({1, 0});
    pool->release({1, 0});
  }
  EXPECT_THAT(
      [&] {
        pool->acquire({1, 0});
      },
      ThrowsMessage<Error>(AllOf(HasSubstr("unit 'layers.0' bucket 'weight'"),
                                 HasSubstr("3 times in one step"), HasSubstr("plan has 2"))));
  pool->begin_step();
  pool->acquire({1, 0});
}

TEST(PlannedPool, ChoosesTheDeepestPrefetchOfItsBudget) {
  CountingAllocator allocator;
  const BucketTable table(small_transformer());
  const int64_t two = plan_prefetch(table, declared_order(table), 2).arena_bytes;
  const auto pool =
      small_transformer_pool({.kind = PoolKind::kPlanned, .budget_bytes = two}, allocator);
  EXPECT_LE(pool->bytes().shared, two);
  EXPECT_EQ(pool->bytes().fixed(), pool->bytes().shared);
  EXPECT_THAT(pool->report(), HasSubstr("prefetch "));
  EXPECT_THAT(
      [&] { small_transformer_pool({.kind = PoolKind::kPlanned, .budget_bytes = 100}, allocator); },
      ThrowsMessage<Error>(
          AllOf(HasSubstr("budget_bytes is 100"), HasSubstr("even with no prefetch"))));
}

TEST(BucketPool, OfEveryKindGathersAsFarAheadAsItsBudgetAllows) {
  CountingAllocator allocator;
  for (const PoolKind kind : all_pool_kinds()) {
    const auto bytes_with = [&](int32_t prefetch) {
      return small_transformer_pool({.kind = kind, .prefetch = prefetch}, allocator)
          ->bytes()
          .total();
    };
    for (int32_t depth = 0; depth < 4; ++depth) {
      const int64_t budget = bytes_with(depth + 1) - 1;
      if (budget < bytes_with(depth)) continue;  // one unit more costs nothing
      const auto pool = small_transformer_pool({.kind = kind, .budget_bytes = budget}, allocator);
      EXPECT_EQ(pool->trace().prefetch, depth) << name_of(kind);
      EXPECT_LE(pool->bytes().total(), budget) << name_of(kind);
    }
  }
}

TEST(PlannedPool, TellsWhoHeldAnAddressBefore) {
  CountingAllocator allocator;
  const BucketTable table({block("a", 1024), block("b", 1024)});
  ArenaPlan plan;  // by hand: b's weights lie where a's weights and half of its gradients were
  plan.trace.num_times = 3;
  plan.trace.intervals = {{{0, 0}, 1024, 0, 0}, {{0, 1}, 2048, 0, 0}, {{1, 0}, 1024, 1, 2}};
  plan.offsets = {0, 1024, 512};
  plan.arena_bytes = 3072;
  const auto pool = make_planned_pool(table, plan, 128, allocator);
  pool->acquire({0, 0});
  pool->acquire({0, 1});
  EXPECT_THAT(pool->previous_holders({0, 0}), ElementsAre(BucketId{1, 0})) << "in the last step";
  pool->release({0, 0});
  pool->release({0, 1});
  pool->acquire({1, 0});
  EXPECT_THAT(pool->previous_holders({1, 0}), UnorderedElementsAre(BucketId{0, 0}, BucketId{0, 1}));
}

TEST(HostSlabAllocator, AlignsAndCanBeWritten) {
  HostSlabAllocator allocator;
  for (const int64_t alignment : {16, 128, 4096}) {
    Slab slab(allocator, 1000, alignment);
    EXPECT_EQ(reinterpret_cast<uintptr_t>(slab.at(0)) % static_cast<uintptr_t>(alignment), 0u);
    std::memset(slab.at(0), 0x5a, 1000);
    Slab moved = std::move(slab);
    EXPECT_EQ(moved.bytes(), 1000);
    EXPECT_EQ(slab.bytes(), 0);  // NOLINT: moved-from slabs are empty
  }
}

}  // namespace
}  // namespace fsdp::bucket_pool_test
