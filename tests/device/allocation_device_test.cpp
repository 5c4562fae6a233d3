// The memory that training takes from libtorch's allocator: what memory() says, and nothing more
// from step to step.
#include <ATen/ATen.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdio>
#include <memory>
#include <ostream>
#include <string>
#include <tuple>

#include "fsdp/base/integer.h"
#include "fsdp/base/text.h"
#include "fsdp/comm/communicator.h"
#include "fsdp/graph/graph.h"
#include "fsdp/memory/device_slab_allocator.h"
#include "support/llama_training.h"
#include "support/require.h"
#include "support/run_ranks.h"

namespace fsdp::allocation_device_test {
namespace {

using testing::LlamaTraining;

struct Allocated {
  int64_t requested_bytes = 0;   // as asked for
  int64_t given_bytes = 0;       // rounded up to blocks
  int64_t reserved_bytes = 0;    // taken from the driver
  int64_t num_blocks = 0;        // given out
  int64_t num_device_calls = 0;  // cudaMalloc and cudaFree

  friend bool operator==(const Allocated&, const Allocated&) = default;
};

std::ostream& operator<<(std::ostream& out, const Allocated& a) {
  return out << a.requested_bytes << " bytes asked for, " << a.given_bytes << " given in "
             << a.num_blocks << " blocks, " << a.reserved_bytes << " reserved, "
             << a.num_device_calls << " calls of the driver";
}

Allocated allocated() {
  constexpr auto kAll = static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE);
  const auto stats = c10::getDeviceAllocator(at::kCUDA)->getDeviceStats(0);
  return {.requested_bytes = stats.requested_bytes[kAll].current,
          .given_bytes = stats.allocated_bytes[kAll].current,
          .reserved_bytes = stats.reserved_bytes[kAll].current,
          .num_blocks = stats.allocation[kAll].current,
          .num_device_calls = stats.num_device_alloc + stats.num_device_free};
}

// libtorch's allocator gives out multiples of this, and does not split off less than a megabyte
// from a large block.
constexpr int64_t kBlockBytes = 512;
constexpr int64_t kUnsplitBytes = int64_t{1} << 20;

// A device's memory, with what libtorch's allocator says about every piece. One rank's.
class WitnessedAllocator final : public SlabAllocator {
 public:
  void* allocate(int64_t bytes, int64_t alignment) override {
    const Allocated before = allocated();
    void* address = device_.allocate(bytes, alignment);
    note(before, allocated());
    rounded_bytes_ += round_up(bytes, kBlockBytes);
    ++num_allocations_;
    ++num_live_;
    return address;
  }
  void deallocate(void* address, int64_t bytes, int64_t alignment) noexcept override {
    const Allocated before = allocated();
    device_.deallocate(address, bytes, alignment);
    note(before, allocated());
    rounded_bytes_ -= round_up(bytes, kBlockBytes);
    --num_live_;
  }

  int64_t requested_bytes() const { return requested_bytes_; }
  int64_t given_bytes() const { return given_bytes_; }
  int64_t rounded_bytes() const { return rounded_bytes_; }
  int64_t peak_bytes() const { return peak_bytes_; }
  int64_t num_allocations() const { return num_allocations_; }
  int64_t num_live() const { return num_live_; }

 private:
  void note(const Allocated& before, const Allocated& after) {
    requested_bytes_ += after.requested_bytes - before.requested_bytes;
    given_bytes_ += after.given_bytes - before.given_bytes;
    peak_bytes_ = std::max(peak_bytes_, requested_bytes_);
  }

  DeviceSlabAllocator device_{c10::Device(at::kCUDA, 0)};
  int64_t requested_bytes_ = 0;
  int64_t given_bytes_ = 0;
  int64_t rounded_bytes_ = 0;
  int64_t peak_bytes_ = 0;
  int64_t num_allocations_ = 0;
  int64_t num_live_ = 0;
};

using MemoryCase = std::tuple<std::string, GradientLifetime, Collectives>;
class MemoryReportOnDevice : public ::testing::TestWithParam<MemoryCase> {};

TEST_P(MemoryReportOnDevice, IsWhatTheAllocatorGaveOut) {
  FSDP_REQUIRE_GPU();
  WitnessedAllocator witness;
  testing::run_ranks(1, [&](World& world) {
    const auto& [strategy, lifetime, collectives] = GetParam();
    const Allocated before = allocated();
    LlamaTraining training(world,
                           {.strategy = parse_strategy(strategy),
                            .gradient_lifetime = lifetime,
                            .collectives = collectives,
                            .allocator = &witness},
                           {});
    const auto expect_equal = [&](const char* when) {
      const MemoryReport memory = training.sharded().memory();
      EXPECT_EQ(memory.total_bytes(), witness.requested_bytes()) << when;
      EXPECT_EQ(memory.peak_bytes, witness.peak_bytes()) << when;
      // No more than the rounding of blocks beyond that.
      EXPECT_GE(witness.given_bytes(), witness.rounded_bytes()) << when;
      EXPECT_LE(witness.given_bytes(), witness.rounded_bytes() + witness.num_live() * kUnsplitBytes)
          << when;
    };
    expect_equal("before the first step");
    for (int i = 0; i < 3; ++i) {
      training.step();
      expect_equal("after a step");
    }
    training.optimizer().wait();
    training.finish();
    expect_equal("when all is done");
    // libtorch keeps more besides: workspaces of products, the optimizer's few numbers, the tokens.
    const Allocated after = allocated();
    const int64_t all = after.requested_bytes - before.requested_bytes;
    std::printf(
        "%s: ours %s in %lld blocks (rounded by %s), all %s in %lld\n", strategy.c_str(),
        bytes_text(static_cast<double>(witness.requested_bytes())).c_str(),
        static_cast<long long>(witness.num_live()),
        bytes_text(static_cast<double>(witness.given_bytes() - witness.requested_bytes())).c_str(),
        bytes_text(static_cast<double>(all)).c_str(),
        static_cast<long long>(after.num_blocks - before.num_blocks));
  });
  EXPECT_EQ(witness.requested_bytes(), 0) << "all of it was given back";
  EXPECT_EQ(witness.given_bytes(), 0);
}

std::string name_of_memory_case(const ::testing::TestParamInfo<MemoryCase>& info) {
  const auto& [strategy, lifetime, collectives] = info.param;
  return concat(strategy, lifetime == GradientLifetime::kStep ? "_step" : "_persistent",
                collectives == Collectives::kAlways ? "_collectives" : "");
}

INSTANTIATE_TEST_SUITE_P(
    Strategies, MemoryReportOnDevice,
    ::testing::Combine(::testing::Values("no_shard", "optim", "optim_grads", "optim_grads_params"),
                       ::testing::Values(GradientLifetime::kPersistent, GradientLifetime::kStep),
                       ::testing::Values(Collectives::kAlways)),
    name_of_memory_case);
INSTANTIATE_TEST_SUITE_P(OneRank, MemoryReportOnDevice,
                         ::testing::Combine(::testing::Values("optim_grads_params"),
                                            ::testing::Values(GradientLifetime::kPersistent,
                                                              GradientLifetime::kStep),
                                            ::testing::Values(Collectives::kBetweenRanks)),
                         name_of_memory_case);

// --- from step to step -------------------------------------------------------------------------

constexpr int kSteps = 10;

enum class By { kStep, kGraph };
using SteadyCase = std::tuple<int, Collectives, GradientLifetime, By>;  // ranks, ...
class SteadyState : public ::testing::TestWithParam<SteadyCase> {};

TEST_P(SteadyState, TakesNoMemoryAfterTheSecondStep) {
  FSDP_REQUIRE_GPU();
  testing::run_ranks(std::get<0>(GetParam()), [&](World& world) {
    const auto& [ranks, collectives, lifetime, by] = GetParam();
    WitnessedAllocator witness;  // of this rank, but others' calls may fall into its own
    LlamaTraining training(world,
                           {.gradient_lifetime = lifetime,
                            .collectives = collectives,
                            .allocator = ranks == 1 ? &witness : nullptr},
                           {.rows = 2, .sequence = 512});
    std::unique_ptr<Graph> graph;
    if (by == By::kGraph)
      graph = std::make_unique<Graph>(training.sharded(), &training.optimizer(),
                                      [&] { training.step(); });
    const auto step = [&] {
      graph ? graph->run() : training.step();
      world.communicator().barrier("a step").wait();
    };
    // A graph is recorded in the step after its warm-up, which is its first.
    const int first = graph ? GraphOptions{}.warmup + 2 : 2;
    for (int i = 0; i < first; ++i) step();
    const Allocated after_second = allocated();
    const int64_t pieces = witness.num_allocations();
    for (int i = 0; i < kSteps; ++i) {
      world.communicator().barrier("look").wait();
      step();
      const Allocated now = allocated();
      world.communicator().barrier("looked").wait();
      EXPECT_EQ(now, after_second) << "step " << first + 1 + i;
    }
    if (lifetime == GradientLifetime::kPersistent) {
      EXPECT_EQ(witness.num_allocations(), pieces) << "our own buffers are there from the start";
    }
  });
}

std::string name_of_steady_case(const ::testing::TestParamInfo<SteadyCase>& info) {
  const auto& [ranks, collectives, lifetime, by] = info.param;
  return concat(by == By::kGraph ? "graph_" : "eager_", ranks,
                collectives == Collectives::kAlways ? "_collectives" : "",
                lifetime == GradientLifetime::kStep ? "_step" : "_persistent");
}

INSTANTIATE_TEST_SUITE_P(
    OneRank, SteadyState,
    ::testing::Combine(::testing::Values(1),
                       ::testing::Values(Collectives::kBetweenRanks, Collectives::kAlways),
                       ::testing::Values(GradientLifetime::kPersistent, GradientLifetime::kStep),
                       ::testing::Values(By::kStep, By::kGraph)),
    name_of_steady_case);
INSTANTIATE_TEST_SUITE_P(
    Ranks, SteadyState,
    ::testing::Combine(::testing::Values(2), ::testing::Values(Collectives::kBetweenRanks),
                       ::testing::Values(GradientLifetime::kPersistent, GradientLifetime::kStep),
                       ::testing::Values(By::kStep)),
    name_of_steady_case);

}  // namespace
}  // namespace fsdp::allocation_device_test
