// memory/memory_ledger.h: the counts of each kind, and the beginning of peaks.
#include "fsdp/memory/memory_ledger.h"

#include <gtest/gtest.h>

#include <set>
#include <string_view>

#include "fsdp/base/error.h"
#include "support/counting_allocator.h"
#include "support/small_transformer.h"

namespace fsdp::memory_ledger_test {
namespace {

using testing::CountingAllocator;
using testing::small_transformer_pool;

TEST(MemoryLedger, CountsBytesAndPeaksByKindAndInTotal) {
  MemoryLedger ledger;
  ledger.add(MemoryKind::kWeight, 100);
  ledger.add(MemoryKind::kPool, 50);
  ledger.remove(MemoryKind::kPool, 50);
  ledger.add(MemoryKind::kReduction, 30);
  EXPECT_EQ(ledger.bytes(MemoryKind::kWeight), 100);
  EXPECT_EQ(ledger.bytes(MemoryKind::kPool), 0);
  EXPECT_EQ(ledger.peak_bytes(MemoryKind::kPool), 50);
  EXPECT_EQ(ledger.bytes(MemoryKind::kMainGrad), 0);
  EXPECT_EQ(ledger.total_bytes(), 130);
  EXPECT_EQ(ledger.total_peak_bytes(), 150) << "the pool was gone when the reduction came";
}

TEST(MemoryLedger, RestartsPeaksAtWhatIsAllocatedNow) {
  MemoryLedger ledger;
  ledger.add(MemoryKind::kMainGrad, 80);
  ledger.remove(MemoryKind::kMainGrad, 60);
  ledger.reset_peak();
  EXPECT_EQ(ledger.peak_bytes(MemoryKind::kMainGrad), 20);
  EXPECT_EQ(ledger.total_peak_bytes(), 20);
  ledger.add(MemoryKind::kMainGrad, 10);
  EXPECT_EQ(ledger.peak_bytes(MemoryKind::kMainGrad), 30);
}

TEST(MemoryLedger, NamesEveryKindDifferently) {
  std::set<std::string_view> names;
  for (int i = 0; i < kNumMemoryKinds; ++i) names.insert(name_of(static_cast<MemoryKind>(i)));
  EXPECT_EQ(names.size(), static_cast<size_t>(kNumMemoryKinds));
  EXPECT_EQ(names.count("?"), 0u);
}

TEST(LedgerAllocator, WritesDownWhatAPoolTakesAndGivesBack) {
  for (const PoolKind kind : all_pool_kinds()) {
    CountingAllocator base;
    MemoryLedger ledger;
    LedgerAllocator allocator(base, ledger, MemoryKind::kPool);
    EXPECT_EQ(allocator.name(), "counting");
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
    EXPECT_EQ(ledger.total_peak_bytes(), base.peak_bytes()) << name_of(kind);
    EXPECT_EQ(base.num_wrong_frees(), 0) << name_of(kind);
  }
}

TEST(LedgerAllocator, CountsTheBytesAskedForAndNotTheRounding) {
  HostSlabAllocator base;
  MemoryLedger ledger;
  LedgerAllocator allocator(base, ledger, MemoryKind::kMainWeight);
  const Slab odd(allocator, 1001, 128);
  const Slab empty(allocator, 0, 128);
  EXPECT_EQ(ledger.bytes(MemoryKind::kMainWeight), 1001);
}

class NoMemory final : public SlabAllocator {
 public:
  void* allocate(int64_t, int64_t) override { throw Error("there is none"); }
  void deallocate(void*, int64_t, int64_t) noexcept override {}
  std::string_view name() const override { return "none"; }
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
