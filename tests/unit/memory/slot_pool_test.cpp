// memory/: double_buffer and max_pool, the pools whose slots take one unit at a time.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "fsdp/base/error.h"
#include "fsdp/memory/bucket_pool.h"
#include "support/counting_allocator.h"
#include "support/small_transformer.h"

namespace fsdp::slot_pool_test {
namespace {

using ::testing::AllOf;
using testing::block;
using testing::CountingAllocator;
using ::testing::HasSubstr;
using testing::small_transformer;
using testing::small_transformer_pool;
using ::testing::ThrowsMessage;

constexpr BucketRole kWeight = BucketRole::kWeight;

int64_t offset_between(void* from, void* to) {
  return static_cast<std::byte*>(to) - static_cast<std::byte*>(from);
}

TEST(OnDemandPool, TakesMemoryForAsLongAsItIsHeldAndPromisesNoAddress) {
  CountingAllocator allocator;
  const auto pool = small_transformer_pool({.kind = PoolKind::kOnDemand}, allocator);
  EXPECT_EQ(pool->bytes().fixed(), 0);
  pool->acquire({0, 0});
  pool->acquire({1, 0});
  EXPECT_EQ(allocator.live_bytes(), 2048 + 1024);
  pool->release({0, 0});
  EXPECT_EQ(allocator.live_bytes(), 1024);
  EXPECT_FALSE(pool->address_is_fixed({1, 0}));
  EXPECT_THAT(pool->report(), HasSubstr("not all addresses are fixed"));
}

TEST(DoubleBuffer, UsesTwoSlotsOfTheMostCommonUnit) {
  CountingAllocator allocator;
  const auto pool = small_transformer_pool({.kind = PoolKind::kDoubleBuffer}, allocator);
  EXPECT_EQ(pool->bytes().weight, 2 * 1024);
  EXPECT_EQ(pool->bytes().gradient, 2 * 2048);
  // With prefetch 1 the head's weights and gradients are live when its backward runs.
  EXPECT_EQ(pool->bytes().on_demand_peak, 4096 + 8192);
  EXPECT_TRUE(pool->address_is_fixed({1, 0}));
  EXPECT_FALSE(pool->address_is_fixed({0, 0}));
  EXPECT_FALSE(pool->addresses_are_fixed());
  EXPECT_THAT(pool->report(), HasSubstr("4 of 6 units use the slots"));

  void* first = pool->acquire({1, 0});
  void* second = pool->acquire({2, 0});
  EXPECT_EQ(offset_between(first, second), 1024);
  pool->release({1, 0});
  EXPECT_EQ(pool->acquire({3, 0}), first);
}

TEST(DoubleBuffer, KeepsOtherUnitsForGoodWhenAsked) {
  CountingAllocator allocator;
  const auto pool = small_transformer_pool(
      {.kind = PoolKind::kDoubleBuffer, .other_units = OtherUnits::kPersistent}, allocator);
  EXPECT_EQ(pool->bytes().weight, 2 * 1024 + 2048 + 4096);
  EXPECT_EQ(pool->bytes().gradient, 2 * 2048 + 4096 + 8192);
  EXPECT_EQ(pool->bytes().on_demand_peak, 0);
  EXPECT_TRUE(pool->addresses_are_fixed());
  void* address = pool->acquire({0, 0});
  pool->release({0, 0});
  EXPECT_EQ(pool->acquire({0, 0}), address);
  EXPECT_EQ(allocator.num_allocations(), 1);
}

TEST(DoubleBuffer, TellsUnitsApartBySizeTypeAndNumberOfBuckets) {
  UnitBuckets fp16 = block("fp16", 1024);
  fp16.buckets[0].dtype = DType::kFloat16;
  UnitBuckets frozen = block("frozen", 1024);
  frozen.buckets.pop_back();
  CountingAllocator allocator;
  const auto pool = make_bucket_pool({fp16, frozen, block("a", 1024), block("b", 1024)},
                                     {.kind = PoolKind::kDoubleBuffer}, allocator);
  EXPECT_FALSE(pool->address_is_fixed({0, 0}));
  EXPECT_FALSE(pool->address_is_fixed({1, 0}));
  EXPECT_TRUE(pool->address_is_fixed({2, 0}));
  EXPECT_TRUE(pool->address_is_fixed({3, 0}));
}

TEST(SlotPool, RefusesAThirdLiveUnitShowingBothSlots) {
  for (const PoolKind kind : {PoolKind::kDoubleBuffer, PoolKind::kMaxPool}) {
    CountingAllocator allocator;
    const auto pool = small_transformer_pool({.kind = kind}, allocator);
    pool->acquire({1, 0});
    pool->acquire({2, 0});
    EXPECT_THAT(
        [&] {
          pool->acquire({3, 0});
        },
        ThrowsMessage<Error>(
            AllOf(HasSubstr("unit 'layers.2' bucket 'weight'"), HasSubstr("2 units are live"),
                  HasSubstr("0 holds unit 'layers.0'"), HasSubstr("1 holds unit 'layers.1'"))))
        << name_of(kind);
    // Gradients have slots of their own, and a failed acquire leaves nothing behind.
    pool->acquire({2, 1});
    pool->release({1, 0});
    pool->acquire({3, 0});
  }
}

TEST(SlotPool, HasOneSlotMoreThanUnitsAreGatheredAhead) {
  CountingAllocator allocator;
  const auto pool = small_transformer_pool({.kind = PoolKind::kMaxPool, .prefetch = 2}, allocator);
  EXPECT_EQ(pool->bytes().weight, 3 * 4096);
  EXPECT_EQ(pool->bytes().gradient, 2 * 8192);
  for (int32_t unit = 0; unit < 3; ++unit) pool->acquire({unit, 0});
  EXPECT_THROW(pool->acquire({3, 0}), Error);
}

TEST(SlotPool, KeepsASlotUntilTheLastBucketOfItsUnitIsReleased) {
  const auto unit = [](const std::string& name) {
    return UnitBuckets{
        name,
        {{"dense", 256, DType::kBFloat16, kWeight}, {"experts", 1024, DType::kBFloat16, kWeight}}};
  };
  CountingAllocator allocator;
  const auto pool = make_bucket_pool({unit("a"), unit("b"), unit("c")}, {}, allocator);
  pool->acquire({0, 0});
  void* experts = pool->acquire({0, 1});
  pool->acquire({1, 0});
  pool->release({0, 0});
  EXPECT_THAT([&] { pool->acquire({2, 0}); }, ThrowsMessage<Error>(HasSubstr("0 holds unit 'a'")));
  pool->release({0, 1});
  pool->acquire({2, 0});
  EXPECT_EQ(pool->acquire({2, 1}), experts);
}

// A unit used twice, as a shared embedding is by a prediction head: between other neighbours its
// own slot may be taken, so the two uses may lie in different slots, but each in the same every
// step.
TEST(SlotPool, GivesEveryUseOfASharedUnitTheSameAddressEveryStep) {
  CountingAllocator allocator;
  const auto pool = make_bucket_pool({block("embedding", 1024), block("a", 1024), block("b", 1024)},
                                     {.on_move = OnMove::kRefuse}, allocator);
  std::vector<std::vector<void*>> seen;
  for (int step = 0; step < 4; ++step) {
    pool->begin_step();
    std::vector<void*>& addresses = seen.emplace_back();
    addresses.push_back(pool->acquire({0, 0}));  // slot 0
    addresses.push_back(pool->acquire({1, 0}));  // slot 1
    pool->release({0, 0});
    addresses.push_back(pool->acquire({2, 0}));  // slot 0
    pool->release({1, 0});
    addresses.push_back(pool->acquire({0, 0}));  // its slot 0 is taken: slot 1
    pool->release({2, 0});
    pool->release({0, 0});
  }
  EXPECT_NE(seen[0][0], seen[0][3]);
  for (const auto& addresses : seen) EXPECT_EQ(addresses, seen[0]);
  EXPECT_TRUE(pool->addresses_are_fixed());
}

void run_pair(BucketPool& pool, int32_t first, int32_t second) {
  pool.begin_step();
  pool.acquire({first, 0});
  pool.acquire({second, 0});
  pool.release({first, 0});
  pool.release({second, 0});
}

TEST(SlotPool, FollowsAChangedOrderAndReportsTheMovedUnits) {
  CountingAllocator allocator;
  const auto pool = small_transformer_pool({.kind = PoolKind::kMaxPool}, allocator);
  run_pair(*pool, 1, 2);
  run_pair(*pool, 3, 4);
  EXPECT_TRUE(pool->addresses_are_fixed());
  run_pair(*pool, 1, 3);  // both were given slot 0
  EXPECT_FALSE(pool->addresses_are_fixed());
  EXPECT_FALSE(pool->address_is_fixed({3, 0}));
  EXPECT_TRUE(pool->address_is_fixed({1, 0}));
}

TEST(SlotPool, RefusesAChangedOrderWhenAddressesMustNotMove) {
  CountingAllocator allocator;
  const auto pool =
      small_transformer_pool({.kind = PoolKind::kMaxPool, .on_move = OnMove::kRefuse}, allocator);
  run_pair(*pool, 1, 2);
  run_pair(*pool, 3, 4);
  EXPECT_THAT([&] { run_pair(*pool, 1, 3); },
              ThrowsMessage<Error>(AllOf(HasSubstr("unit 'layers.2' bucket 'weight'"),
                                         HasSubstr("must not change"),
                                         HasSubstr("0 holds unit 'layers.0'"))));
  EXPECT_TRUE(pool->addresses_are_fixed());
}

}  // namespace
}  // namespace fsdp::slot_pool_test
