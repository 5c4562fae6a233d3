// memory/memory_ledger.h: the counts of each kind, and the peak of their total.
#include "fsdp/memory/memory_ledger.h"

#include <gtest/gtest.h>

#include "fsdp/base/error.h"
#include "support/counting_allocator.h"
#include "support/small_transformer.h"

namespace fsdp::memory_ledger_test {
namespace {

using testing::CountingAllocator;
using testing::small_transformer_pool;

TEST(MemoryLedger, CountsBytesByKindAndThePeakOfTheTotal) {
  MemoryLedger ledger;
  ledger.add(MemoryKind::kWeight, 100);
  ledger.add(MemoryKind::kPool, 50);
  ledger.remove(MemoryKind::kPool, 50);
  ledger.add(MemoryKind::kReduction, 30);
  EXPECT_EQ(ledger.bytes(MemoryKind::kWeight), 100);
  EXPECT_EQ(ledger.bytes(MemoryKind::kPool), 0);
  EXPECT_EQ(ledger.bytes(MemoryKind::kMainGrad), 0);
  EXPECT_EQ(ledger.total_bytes(), 130);
  EXPECT_EQ(ledger.total_peak_bytes(), 150) << "the pool was gone when the reduction came";
}

TEST(LedgerAllocator, WritesDownWhatAPoolTakesAndGivesBack) {
  for (const PoolKind kind : all_pool_kinds()) {
    CountingAllocator base;
    MemoryLedger ledger;
    LedgerAllocator allocator(base, ledger, MemoryKind::kPool);
    {
      const auto pool = small_transformer_pool({.kind = kind}, allocator);
      pool->begin_step();
      pool->acquire({0, 0});
      pool->acquire({1, 0});
      EXPECT_EQ(ledger.bytes(MemoryKind::kPool), base.live_bytes()) << name_of(kind);
      EXPECT_GT(ledger.total_bytes(), 0) << name_of(kind);
      pool->release({0, 0});
      EXPECT_EQ(ledger.bytes(MemoryKind::kPool), base.live_bytes()) << name_of(kind);
    }
    EXPECT_EQ(ledger.total_bytes(), 0) << name_of(kind);
    EXPECT_EQ(base.live_bytes(), 0) << name_of(kind);
    EXPECT_EQ(ledger.total_peak_bytes(), base.peak_bytes()) << name_of(kind);
    EXPECT_EQ(base.num_wrong_frees(), 0) << name_of(kind);
  }
}

class NoMemory final : public SlabAllocator {
 public:
  void* allocate(int64_t, int64_t) override { throw Error("there is none"); }
  void deallocate(void*, int64_t, int64_t) noexcept override {}
};

TEST(LedgerAllocator, CountsNothingWhenAllocationFails) {
  NoMemory base;
  MemoryLedger ledger;
  LedgerAllocator allocator(base, ledger, MemoryKind::kWeight);
  EXPECT_THROW(allocator.allocate(64, 64), Error);
  EXPECT_EQ(ledger.total_bytes(), 0);
  EXPECT_EQ(ledger.total_peak_bytes(), 0);
}

}  // namespace
}  // namespace fsdp::memory_ledger_test
