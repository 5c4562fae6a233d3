// layout/group_types.h and memory/bucket.h: what engine and forecast agree on.
#include "fsdp/layout/group_types.h"

#include <gtest/gtest.h>

#include <set>
#include <string>

#include "fsdp/base/text.h"
#include "fsdp/memory/bucket.h"

namespace fsdp::group_types_test {
namespace {

constexpr MeshShape kMesh{.outer = 2, .inner = 4};

// 1000 elements, which no padding to 128 bytes leaves alone.
FlatLayout layout_of(const GroupTypes& types, MeshShape mesh) {
  return FlatLayout({.shapes = {{10, 100}},
                     .element_bytes = narrowest_bytes(types),
                     .inner_ranks = mesh.inner,
                     .outer_ranks = mesh.outer});
}

GroupBuckets buckets_of(const GroupTypes& types, const Strategy& strategy, MeshShape mesh = kMesh) {
  return group_buckets(layout_of(types, mesh), types, strategy, mesh);
}

TEST(GroupTypes, LeaveNothingToDefaults) {
  const PrecisionTypes defaults;
  const GroupTypes bf16 = resolve_types(DType::kBFloat16, defaults, Trainable::kYes);
  EXPECT_EQ(bf16.main_weight, DType::kFloat32);
  EXPECT_EQ(bf16.main_grad, DType::kBFloat16);
  EXPECT_EQ(bf16.wire, DType::kBFloat16);
  EXPECT_EQ(bf16.first_moment, DType::kFloat32);
  EXPECT_EQ(bf16.second_moment, DType::kFloat32);
  const GroupTypes fp32 = resolve_types(DType::kFloat32, defaults, Trainable::kYes);
  EXPECT_EQ(fp32.main_weight, std::nullopt) << "equal to the weight: aliased";
  EXPECT_EQ(fp32.wire, DType::kFloat32);
  EXPECT_EQ(resolve_types(DType::kFloat8E4M3, defaults, Trainable::kYes).main_grad,
            DType::kBFloat16);
  EXPECT_EQ(resolve_types(DType::kBFloat16, {.main_grads = DType::kFloat32}, Trainable::kYes).wire,
            DType::kFloat32);
}

TEST(GroupTypes, OfFrozenAndWholeNumberGroupsAreTheWeightsAlone) {
  const PrecisionTypes wide{.main_grads = DType::kFloat32, .grad_comm = DType::kFloat32};
  for (const GroupTypes& types : {resolve_types(DType::kBFloat16, wide, Trainable::kNo),
                                  resolve_types(DType::kInt64, wide, Trainable::kYes)}) {
    EXPECT_FALSE(types.trainable);
    EXPECT_EQ(types.main_weight, std::nullopt);
    EXPECT_EQ(types.first_moment, std::nullopt);
    EXPECT_EQ(types.second_moment, std::nullopt);
    EXPECT_EQ(types.main_grad, types.weight);
    EXPECT_EQ(types.wire, types.weight);
  }
}

TEST(GroupTypes, SplitOnlyFloatMainWeightsOfBFloat16Weights) {
  for (const DType weight : all_dtypes())
    for (const DType main : all_dtypes())
      for (const MainStorage storage : all_main_storages()) {
        const GroupTypes types =
            resolve_types(weight, {.main_params = main, .main_storage = storage}, Trainable::kYes);
        const bool splits =
            storage == MainStorage::kSplit && weight == DType::kBFloat16 && main == DType::kFloat32;
        const bool exists = is_floating(weight) && main != weight;
        SCOPED_TRACE(concat(name_of(weight), " ", name_of(main), " ", name_of(storage)));
        EXPECT_EQ(types.split, splits);
        EXPECT_EQ(types.main_weight, exists ? std::optional(main) : std::nullopt)
            << "split or not, it is a number of that type";
        EXPECT_EQ(main_weight_bytes(types), splits ? 2 : exists ? element_bytes(main) : 0);
      }
}

TEST(GroupTypes, TheNarrowestBufferThatExistsDecidesTheAlignment) {
  const auto narrowest = [](DType weight, const PrecisionTypes& precision, Trainable trainable) {
    return narrowest_bytes(resolve_types(weight, precision, trainable));
  };
  EXPECT_EQ(narrowest(DType::kFloat32, {}, Trainable::kYes), 4);
  EXPECT_EQ(narrowest(DType::kFloat32, {.grad_comm = DType::kBFloat16}, Trainable::kYes), 2);
  EXPECT_EQ(narrowest(DType::kFloat32, {.main_grads = DType::kBFloat16}, Trainable::kYes), 2);
  EXPECT_EQ(narrowest(DType::kFloat32, {.main_params = DType::kBFloat16}, Trainable::kYes), 2);
  EXPECT_EQ(narrowest(DType::kFloat32, {.first_moment = DType::kFloat8E4M3}, Trainable::kYes), 4)
      << "moments may be unaligned";
  EXPECT_EQ(narrowest(DType::kFloat32, {.grad_comm = DType::kBFloat16}, Trainable::kNo), 4)
      << "a frozen group has no gradient that could be narrower";
}

TEST(GroupBuckets, HaveThePaddedSizeWhereABufferIsCut) {
  const GroupTypes types =
      resolve_types(DType::kBFloat16, {.main_grads = DType::kFloat32}, Trainable::kYes);
  const struct {
    Strategy strategy;
    bool has_weight;
    bool has_gradient;
  } cases[] = {{Strategy::no_shard, false, false},
               {Strategy::optim.hfsdp(), false, false},
               {Strategy::optim_grads, false, true},
               {Strategy::optim_grads_params, true, true}};
  for (const auto& [strategy, has_weight, has_gradient] : cases) {
    EXPECT_EQ(buckets_of(types, strategy).weight.has_value(), has_weight) << strategy.name;
    EXPECT_EQ(buckets_of(types, strategy).gradient.has_value(), has_gradient) << strategy.name;
    const GroupBuckets whole = buckets_of(types, strategy, {.outer = 4, .inner = 1});
    EXPECT_FALSE(whole.weight || whole.gradient) << strategy.name;
  }
  const int64_t padded_numel = layout_of(types, kMesh).padded_numel();
  ASSERT_GT(padded_numel, 1000);
  const GroupBuckets buckets = buckets_of(types, Strategy::optim_grads_params);
  EXPECT_EQ(buckets.weight->bytes, 2 * padded_numel);
  EXPECT_EQ(buckets.weight->dtype, DType::kBFloat16);
  EXPECT_EQ(buckets.weight->role, BucketRole::kWeight);
  EXPECT_EQ(buckets.gradient->bytes, 4 * padded_numel);
  EXPECT_EQ(buckets.gradient->dtype, DType::kFloat32);
  EXPECT_EQ(buckets.gradient->role, BucketRole::kGradient);
}

TEST(GroupBuckets, HaveNamesThatAreUniqueWithinAUnit) {
  UnitBuckets unit{"block", {}};
  for (const DType dtype : {DType::kBFloat16, DType::kFloat32, DType::kInt64}) {
    for (const Trainable trainable : {Trainable::kNo, Trainable::kYes}) {
      if (dtype == DType::kInt64 && trainable == Trainable::kYes) continue;  // one group only
      const GroupBuckets buckets =
          buckets_of(resolve_types(dtype, {}, trainable), Strategy::optim_grads_params);
      unit.buckets.push_back(*buckets.weight);
      if (buckets.gradient) unit.buckets.push_back(*buckets.gradient);
    }
  }
  const BucketTable table({unit});
  std::set<std::string> names;
  for (const Bucket& bucket : unit.buckets) names.insert(bucket.name);
  ASSERT_EQ(names.size(), 7u);
  EXPECT_EQ(table.bucket(0).name, "weight.bf16.frozen");
  EXPECT_EQ(table.bucket(1).name, "weight.bf16");
  EXPECT_EQ(table.bucket(2).name, "gradient.bf16");
  EXPECT_EQ(table.bucket(6).name, "weight.int64");
}

}  // namespace
}  // namespace fsdp::group_types_test
