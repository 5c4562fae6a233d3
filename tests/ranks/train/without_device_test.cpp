// Everything that needs a device says so where it is to work on the host.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "fsdp/base/error.h"
#include "fsdp/graph/graph.h"
#include "fsdp/memory/device_slab_allocator.h"
#include "fsdp/nn/language_model.h"
#include "fsdp/shard/fully_shard.h"
#include "support/run_ranks.h"
#include "support/small_models.h"

namespace fsdp::without_device_test {
namespace {

using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

TEST(DeviceSlabAllocator, LeavesHostMemoryToItsOwnAllocator) {
  EXPECT_THAT([] { DeviceSlabAllocator allocator(at::Device(at::kCPU)); },
              ThrowsMessage<Error>(HasSubstr("use a HostSlabAllocator")));
}

TEST(Graph, NeedsADeviceThatRecords) {
  testing::run_ranks(1, [](World& world) {
    const Mesh mesh = world.mesh();
    const auto model = build_language_model(testing::small_llama(), {.seed = 3});
    const Sharded sharded = fully_shard(model, mesh, {});
    EXPECT_THAT([&] { Graph(sharded, nullptr, [] {}); },
                ThrowsMessage<UsageError>(HasSubstr("a graph of steps on cpu was asked for")));
  });
}

TEST(Graph, IsRecordedAfterTwoStepsOrMore) {
  EXPECT_THAT([] { GraphOptions{.warmup = 1}.validate(); },
              ThrowsMessage<UsageError>(HasSubstr("graph.warmup is 1")));
}

}  // namespace
}  // namespace fsdp::without_device_test
