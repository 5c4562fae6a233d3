// memory/: the guarantees and the errors of pools.
#include "fsdp/memory/bucket_pool.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>

#include "fsdp/base/error.h"
#include "fsdp/memory/pool/planned_pool.h"
#include "support/counting_allocator.h"
#include "support/small_transformer.h"

namespace fsdp::bucket_pool_test {
namespace {

using ::testing::AllOf;
using testing::block;
using testing::CountingAllocator;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using testing::small_transformer;
using testing::small_transformer_pool;
using ::testing::ThrowsMessage;

constexpr BucketRole kWeight = BucketRole::kWeight;

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

TEST(BucketPool, NamesUnitBucketAndWhatIsHeldWhenItIsMisused) {
  for (const PoolKind kind : all_pool_kinds()) {
    CountingAllocator allocator;
    const auto pool = small_transformer_pool({.kind = kind}, allocator);
    const auto refuses = [&](const auto& call, const std::string& words, const std::string& state) {
      EXPECT_THAT(call, ThrowsMessage<Error>(AllOf(HasSubstr(words), HasSubstr(state))))
          << name_of(kind);
    };
    refuses(
        [&] {
          pool->release({2, 1});
        },
        "unit 'layers.1' bucket 'gradient' is released but not held", "nothing is held");
    pool->acquire({1, 0});
    refuses(
        [&] {
          pool->acquire({1, 0});
        },
        "unit 'layers.0' bucket 'weight' is acquired twice", "held: unit 'layers.0'");
    refuses([&] { pool->begin_step(); }, "1 buckets are still held", "'layers.0'");
    refuses([&] { pool->acquire({6, 0}); }, "unit 6 bucket 0 is unknown", "has 6 units");
    refuses([&] { pool->acquire({0, 2}); }, "unit 0 bucket 2 is unknown", "");
    EXPECT_THROW(pool->release({-1, 0}), Error);
    EXPECT_THROW(pool->address_is_fixed({9, 9}), Error);
    pool->release({1, 0});  // what failed has changed nothing
    EXPECT_NO_THROW(pool->begin_step()) << name_of(kind);
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
    EXPECT_NO_THROW(pool->begin_step()) << "nothing is held, " << name_of(kind);
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
  EXPECT_THAT(
      [&] {
        planned->acquire({1, 0});
      },
      ThrowsMessage<Error>(AllOf(HasSubstr("unit 'layers.0' bucket 'weight'"),
                                 HasSubstr("3 times in one step"), HasSubstr("plan has 2"))));
  planned->begin_step();
  EXPECT_TRUE(planned->can_acquire({1, 0}));
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
