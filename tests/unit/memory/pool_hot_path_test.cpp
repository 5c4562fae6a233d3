// memory/: acquire and release once a step has been seen.
#include <gtest/gtest.h>

#include <chrono>
#include <cstdio>

#include "fsdp/memory/bucket_pool.h"
#include "support/counted_news.h"

namespace fsdp::pool_hot_path_test {
namespace {

using testing::num_news;

std::vector<UnitBuckets> stack(int32_t num_units) {
  std::vector<UnitBuckets> units;
  for (int32_t i = 0; i < num_units; ++i) {
    units.push_back({"layers." + std::to_string(i),
                     {{"weight", 256, DType::kBFloat16, BucketRole::kWeight},
                      {"gradient", 512, DType::kFloat32, BucketRole::kGradient}}});
  }
  return units;
}

struct Event {
  BucketId bucket;
  bool is_acquire;
};

std::vector<Event> events_of(const LiveTrace& trace) {
  std::vector<Event> events;
  for (int32_t time = 0; time <= trace.num_times; ++time) {
    for (const LiveInterval& each : trace.intervals) {
      if (each.last == time - 1) events.push_back({each.bucket, false});
    }
    for (const LiveInterval& each : trace.intervals) {
      if (each.first == time) events.push_back({each.bucket, true});
    }
  }
  return events;
}

// Asks before each acquire; returns how often the answer was yes.
int64_t run(BucketPool& pool, const std::vector<Event>& events) {
  pool.begin_step();
  int64_t num_free = 0;
  for (const Event& event : events) {
    if (event.is_acquire) {
      num_free += pool.can_acquire(event.bucket) ? 1 : 0;
      pool.acquire(event.bucket);
    } else {
      pool.release(event.bucket);
    }
  }
  return num_free;
}

TEST(PoolHotPath, AllocatesNothingOnceAStepHasBeenSeen) {
  for (const PoolKind kind : {PoolKind::kDoubleBuffer, PoolKind::kMaxPool, PoolKind::kPlanned}) {
    HostSlabAllocator allocator;
    const auto pool = make_bucket_pool(stack(80), {.kind = kind, .prefetch = 2}, allocator);
    const std::vector<Event> events = events_of(pool->trace());
    run(*pool, events);
    const int64_t before = num_news();
    const auto begin = std::chrono::steady_clock::now();
    constexpr int kSteps = 200;
    int64_t num_free = 0;
    for (int step = 0; step < kSteps; ++step) num_free += run(*pool, events);
    const auto elapsed = std::chrono::steady_clock::now() - begin;
    EXPECT_EQ(num_news() - before, 0) << name_of(kind);
    EXPECT_EQ(num_free * 2, kSteps * static_cast<int64_t>(events.size())) << name_of(kind);
    const double ns = std::chrono::duration<double, std::nano>(elapsed).count();
    std::printf("  %-14s %6.1f ns per acquire or release\n", name_of(kind).data(),
                ns / (kSteps * static_cast<double>(events.size())));
  }
}

TEST(PoolHotPath, SeesAllocationsWhenThereAreAny) {
  HostSlabAllocator allocator;
  const auto pool = make_bucket_pool(stack(4), {.kind = PoolKind::kMaxPool}, allocator);
  const std::vector<Event> events = events_of(pool->trace());
  const int64_t before = num_news();
  run(*pool, events);  // the first step records
  EXPECT_GT(num_news() - before, 0);
}

}  // namespace
}  // namespace fsdp::pool_hot_path_test
