// Pools on device memory: the addresses they hand out are usable there, and stay the same.
#include "fsdp/memory/device_slab_allocator.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>

#include "fsdp/base/error.h"
#include "support/require.h"
#include "support/small_transformer.h"

namespace fsdp::device_slab_allocator_test {
namespace {

using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

const at::Device kDevice(at::kCUDA, 0);

TEST(DeviceSlabAllocator, GivesPoolsMemoryThatTheDeviceCanUse) {
  FSDP_REQUIRE_GPU();
  for (const PoolKind kind : all_pool_kinds()) {
    DeviceSlabAllocator allocator(kDevice);
    const auto pool = testing::small_transformer_pool({.kind = kind}, allocator);
    std::map<int32_t, void*> first_step;
    for (int step = 0; step < 3; ++step) {
      pool->begin_step();
      for (int32_t unit = 0; unit < 6; ++unit) {
        const BucketId id{.unit = unit, .bucket = 0};
        void* address = pool->acquire(id);
        at::Tensor weights =
            at::from_blob(address, {512}, at::device(kDevice).dtype(at::kBFloat16));
        weights.fill_(unit);
        EXPECT_EQ(weights.sum().item<float>(), 512.0f * static_cast<float>(unit));
        if (pool->address_is_fixed(id)) {
          EXPECT_EQ(first_step.try_emplace(unit, address).first->second, address) << name_of(kind);
        }
        pool->release(id);
      }
    }
  }
}

TEST(DeviceSlabAllocator, SaysInOneSentenceThatTheDeviceIsFull) {
  FSDP_REQUIRE_GPU();
  DeviceSlabAllocator allocator(kDevice);
  EXPECT_THAT([&] { allocator.allocate(int64_t{1} << 45, 128); },
              ThrowsMessage<Error>(HasSubstr("cuda:0 has no 32.0 TiB of memory left")));
}

}  // namespace
}  // namespace fsdp::device_slab_allocator_test
