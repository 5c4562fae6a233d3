// Packing on a device gives what copying and adding tensor by tensor on the host does.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <vector>

#include "fsdp/base/torch_dtype.h"
#include "fsdp/shard/group/pack_on_device.h"
#include "support/require.h"

#define FSDP_REQUIRE_DEVICE_PACKS() \
  FSDP_REQUIRE_GPU();               \
  if (!has_device_packs()) GTEST_SKIP() << "built without CUDA kernels"

namespace fsdp::pack_device_test {
namespace {

constexpr at::ScalarType kTypes[] = {at::kFloat, at::kBFloat16, at::kHalf};

// Tensors one after the other in a flat buffer, with gaps that must not be touched.
struct Bucket {
  at::Tensor flat;                  // on the host, as it is before
  std::vector<at::Tensor> tensors;  // on the host
  std::vector<int64_t> begins;      // in the flat buffer
  std::vector<bool> adds;
};

Bucket drawn(const std::vector<int64_t>& numels, at::ScalarType from, at::ScalarType to,
             int64_t gap) {
  at::manual_seed(11);
  Bucket bucket;
  int64_t at = gap;
  for (size_t i = 0; i < numels.size(); ++i) {
    bucket.tensors.push_back(at::randn({numels[i]}).to(from));
    bucket.begins.push_back(at);
    bucket.adds.push_back(i % 3 == 1);
    at += numels[i] + gap;
  }
  bucket.flat = at::randn({at}).to(to);
  return bucket;
}

at::Tensor packed_on_host(const Bucket& bucket) {
  at::Tensor flat = bucket.flat.clone();
  for (size_t i = 0; i < bucket.tensors.size(); ++i) {
    at::Tensor to = flat.narrow(0, bucket.begins[i], bucket.tensors[i].numel());
    const at::Tensor value = bucket.tensors[i].to(at::kFloat);
    to.copy_(bucket.adds[i] ? to.to(at::kFloat) + value : value);
  }
  return flat;
}

at::Tensor packed_on_device(const Bucket& bucket) {
  const at::Tensor flat = bucket.flat.to(at::kCUDA);
  std::vector<at::Tensor> tensors;
  std::vector<PackedTensor> list;
  for (size_t i = 0; i < bucket.tensors.size(); ++i) {
    tensors.push_back(bucket.tensors[i].to(at::kCUDA));
    list.push_back({.from = tensors.back().const_data_ptr(),
                    .from_dtype = dtype_of(tensors.back().scalar_type()),
                    .to = flat.narrow(0, bucket.begins[i], tensors.back().numel()).data_ptr(),
                    .numel = tensors.back().numel(),
                    .adds = bucket.adds[i]});
  }
  pack_on_device(list, dtype_of(flat.scalar_type()), nullptr);
  return flat.cpu();
}

TEST(PackOnDevice, GivesTheBitsOfTheHostInEveryPairOfTypes) {
  FSDP_REQUIRE_DEVICE_PACKS();
  // Shorter and longer than a vector, a chunk and many chunks.
  const std::vector<int64_t> numels = {1, 3, 4, 5, 1023, 4096, 4097, 12288, 100'003};
  for (const at::ScalarType from : kTypes)
    for (const at::ScalarType to : kTypes)
      for (const int64_t gap : {8, 3}) {  // aligned as vectors, and not
        const Bucket bucket = drawn(numels, from, to, gap);
        EXPECT_TRUE(at::equal(packed_on_device(bucket), packed_on_host(bucket)))
            << from << " to " << to << ", gap " << gap;
      }
}

TEST(PackOnDevice, TakesMoreTensorsThanOneLaunchLists) {
  FSDP_REQUIRE_DEVICE_PACKS();
  std::vector<int64_t> numels;
  for (int64_t i = 0; i < 300; ++i) numels.push_back(i % 7 == 0 ? 0 : i * 37 % 5000);
  const Bucket bucket = drawn(numels, at::kBFloat16, at::kFloat, 4);
  EXPECT_TRUE(at::equal(packed_on_device(bucket), packed_on_host(bucket)));
}

TEST(PackOnDevice, DoesNothingWithoutTensors) {
  FSDP_REQUIRE_DEVICE_PACKS();
  pack_on_device({}, DType::kFloat32, nullptr);
  const PackedTensor empty{};
  pack_on_device({&empty, 1}, DType::kFloat32, nullptr);
}

}  // namespace
}  // namespace fsdp::pack_device_test
