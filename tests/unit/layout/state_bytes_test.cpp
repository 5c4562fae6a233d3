// layout/state_bytes.h: how much state a shard has, and which part of it is on the host.
#include "fsdp/layout/state_bytes.h"

#include <gtest/gtest.h>

#include "fsdp/base/text.h"

namespace fsdp::state_bytes_test {
namespace {

TEST(OffloadedNumel, IsTheFractionToTheNearestElement) {
  EXPECT_EQ(offloaded_numel(0, 0.5), 0);
  EXPECT_EQ(offloaded_numel(1, 0.49), 0);
  EXPECT_EQ(offloaded_numel(1, 0.5), 1);
  EXPECT_EQ(offloaded_numel(3, 0.5), 2) << "halves go to the host";
  EXPECT_EQ(offloaded_numel(1000, 0.3), 300);
  for (int64_t percent = 0; percent <= 100; ++percent)
    EXPECT_EQ(offloaded_numel(100, static_cast<double>(percent) / 100), percent);
}

TEST(OffloadedNumel, IsNothingOfZeroAndAllOfOne) {
  for (const int64_t numel : {int64_t{0}, int64_t{1}, int64_t{1003781406}, (int64_t{1} << 53) + 1,
                              (int64_t{1} << 62) - 1}) {
    EXPECT_EQ(offloaded_numel(numel, 0), 0);
    EXPECT_EQ(offloaded_numel(numel, 1), numel);
    EXPECT_LE(offloaded_numel(numel, 0.999999), numel);
  }
}

TEST(NumScales, IsOnePerBlockOfTheWholeBufferThatIsTouched) {
  EXPECT_EQ(num_scales({5, 5}), 0);
  EXPECT_EQ(num_scales({0, 1}), 1);
  EXPECT_EQ(num_scales({0, 128}), 1);
  EXPECT_EQ(num_scales({0, 129}), 2);
  EXPECT_EQ(num_scales({127, 129}), 2);
  EXPECT_EQ(num_scales({128, 256}), 1);
  EXPECT_EQ(num_scales({64, 320}), 3);
}

TEST(MomentBytes, HaveScalesWhereTheRangeOfTheTypeIsNarrow) {
  const FlatRange flat{64, 320};
  EXPECT_EQ(moment_bytes(DType::kFloat32, flat), 4 * 256);
  EXPECT_EQ(moment_bytes(DType::kBFloat16, flat), 2 * 256);
  EXPECT_EQ(moment_bytes(DType::kFloat16, flat), 2 * 256 + 4 * 3);
  EXPECT_EQ(moment_bytes(DType::kFloat8E4M3, flat), 256 + 4 * 3);
  EXPECT_EQ(moment_bytes(DType::kFloat8E5M2, flat), 256 + 4 * 3);
}

TEST(HostWeight, IsWholeAndNeverMissing) {
  const auto bytes = [](DType weight, std::optional<DType> main, MainStorage storage) {
    return host_weight_bytes(
        resolve_types(weight, {.main_params = main, .main_storage = storage}, Trainable::kYes));
  };
  EXPECT_EQ(bytes(DType::kBFloat16, DType::kFloat32, MainStorage::kSplit), 4);
  EXPECT_EQ(bytes(DType::kBFloat16, DType::kFloat32, MainStorage::kSeparate), 4);
  EXPECT_EQ(bytes(DType::kBFloat16, std::nullopt, MainStorage::kSplit), 2);
  EXPECT_EQ(bytes(DType::kFloat32, DType::kFloat32, MainStorage::kSeparate), 4);
}

TEST(StatePlaces, CutAShardOnceWithoutGapOrOverlap) {
  for (const Granularity granularity :
       {Granularity::element(), Granularity::row(), Granularity::tensor()})
    for (const PlacementPair placed : kAllPlacementPairs)
      for (const double fraction : {0.0, 0.1, 1.0 / 3, 0.5, 0.99, 1.0}) {
        const FlatLayout layout({.shapes = {{7, 33}, {5}, {0, 3}, {64, 64}, {}, {3, 5, 7}},
                                 .element_bytes = 2,
                                 .inner_ranks = 3,
                                 .outer_ranks = 2,
                                 .granularity = granularity});
        for (int64_t rank = 0; rank < 6; ++rank) {
          const MeshCoordinate place{.outer = rank / 3, .inner = rank % 3};
          const auto shard = layout.shard_ranges(placed, place);
          const StatePlaces places = state_places(shard, fraction);
          SCOPED_TRACE(
              concat(to_text(granularity), " ", to_text(placed), " ", fraction, " ", rank));
          EXPECT_EQ(numel_of(places.host), offloaded_numel(numel_of(shard), fraction));
          std::vector<ShardRange> all = places.device;
          all.insert(all.end(), places.host.begin(), places.host.end());
          int64_t local = 0;
          size_t at = 0;
          for (const ShardRange& range : all) {
            ASSERT_FALSE(range.flat.empty());
            EXPECT_EQ(range.local_begin, local);
            local += range.flat.numel();
            while (at < shard.size() && shard[at].flat.end <= range.flat.begin) ++at;
            ASSERT_LT(at, shard.size());
            EXPECT_EQ(intersect(range.flat, shard[at].flat), range.flat);
            EXPECT_EQ(range.flat.begin - shard[at].flat.begin,
                      range.local_begin - shard[at].local_begin);
            EXPECT_EQ(range.segment, shard[at].segment);
          }
          EXPECT_EQ(local, numel_of(shard));
        }
      }
}

}  // namespace
}  // namespace fsdp::state_bytes_test
