// layout/flat_layout.h: offsets, shards and slices on examples small enough to draw.
#include "fsdp/layout/flat_layout.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "fsdp/base/error.h"

namespace fsdp::flat_layout_test {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::ThrowsMessage;

constexpr PlacementPair kReplicated = {Placement::kReplicate, Placement::kReplicate};
constexpr PlacementPair kInner = {Placement::kReplicate, Placement::kShard};
constexpr PlacementPair kOuter = {Placement::kShard, Placement::kReplicate};
constexpr PlacementPair kBoth = {Placement::kShard, Placement::kShard};

// Alignment of one element, so that the numbers can be counted on fingers.
FlatLayoutRequest unaligned(std::vector<std::vector<int64_t>> shapes, int64_t inner_ranks,
                            Granularity granularity = Granularity::element()) {
  return {.shapes = std::move(shapes),
          .element_bytes = 2,
          .inner_ranks = inner_ranks,
          .align_bytes = 2,
          .granularity = granularity};
}

std::vector<int64_t> offsets_of(const FlatLayout& layout) {
  std::vector<int64_t> offsets;
  for (int64_t t = 0; t < layout.num_tensors(); ++t) {
    offsets.push_back(layout.tensor_range(t).begin);
  }
  return offsets;
}

std::vector<FlatRange> flat_ranges(const FlatLayout& layout, PlacementPair placed,
                                   MeshCoordinate rank) {
  std::vector<FlatRange> ranges;
  for (const ShardRange& range : layout.shard_ranges(placed, rank)) ranges.push_back(range.flat);
  return ranges;
}

TEST(FlatLayout, StartsEveryTensorAndShardAt128Bytes) {
  // 128 bytes are 64 bf16 elements; a scalar takes 64, an empty tensor nothing.
  const FlatLayout layout(
      {.shapes = {{3, 5}, {}, {0, 4}, {65}}, .element_bytes = 2, .inner_ranks = 3});
  EXPECT_EQ(layout.align_numel(), 64);
  EXPECT_THAT(offsets_of(layout), ElementsAre(0, 64, 0, 128));
  EXPECT_EQ(layout.tensor_numel(), 15 + 1 + 0 + 65);
  EXPECT_EQ(layout.padded_numel(), 3 * 128) << "4 * 64 elements are two shares too few for 3 ranks";
  EXPECT_EQ(layout.max_shard_numel(kInner), 128);
  EXPECT_THAT(flat_ranges(layout, kInner, {.inner = 1}), ElementsAre(FlatRange{128, 256}));
}

TEST(FlatLayout, CutsTheInnerAxisFirstSoThatInnerShardsAreContiguous) {
  // 12 elements, 3 inner ranks, 2 outer ranks:  |0 1|2 3||4 5|6 7||8 9|10 11|
  //                                      outer    0   1    0   1    0    1
  FlatLayoutRequest request = unaligned({{12}}, 3);
  request.outer_ranks = 2;
  const FlatLayout layout(request);
  const MeshCoordinate rank{.outer = 1, .inner = 2};
  EXPECT_THAT(flat_ranges(layout, kReplicated, rank), ElementsAre(FlatRange{0, 12}));
  EXPECT_THAT(flat_ranges(layout, kInner, rank), ElementsAre(FlatRange{8, 12}));
  EXPECT_THAT(flat_ranges(layout, kBoth, rank), ElementsAre(FlatRange{10, 12}));
  // The result of an all-gather of the shard above over the inner axis.
  EXPECT_THAT(
      layout.shard_ranges(kOuter, rank),
      ElementsAre(ShardRange{{2, 4}, 0, 0}, ShardRange{{6, 8}, 2, 0}, ShardRange{{10, 12}, 4, 0}));
  // Partial sums cover the whole range, like copies.
  EXPECT_THAT(flat_ranges(layout, {Placement::kPartial, Placement::kShard}, rank),
              ElementsAre(FlatRange{8, 12}));
  EXPECT_EQ(layout.max_shard_numel(kReplicated), 12);
  EXPECT_EQ(layout.max_shard_numel(kInner), 4);
  EXPECT_EQ(layout.max_shard_numel(kOuter), 6);
  EXPECT_EQ(layout.max_shard_numel(kBoth), 2);
}

TEST(FlatLayout, SlicesGiveTensorAndShardCoordinates) {
  // tensor 0 is [0, 6), tensor 1 [6, 11); shares of 4:  |0 1 2 3|4 5 6 7|8 9 10 -|
  const FlatLayout layout(unaligned({{2, 3}, {5}}, 3));
  EXPECT_THAT(layout.tensor_slices(kInner, {.inner = 1}),
              ElementsAre(TensorSlice{0, {4, 6}, 0}, TensorSlice{1, {0, 2}, 2}));
  EXPECT_THAT(layout.tensor_slices(kInner, {.inner = 2}), ElementsAre(TensorSlice{1, {2, 5}, 0}));
  EXPECT_THAT(layout.tensor_slices(kInner, {.inner = 0}, 1), IsEmpty());
  EXPECT_THAT(layout.tensor_slices(kReplicated, {.inner = 2}, 1),
              ElementsAre(TensorSlice{1, {0, 5}, 6}));
}

TEST(FlatLayout, BlocksAreCutFromEachTensorsStart) {
  // Blocks of 4: tensors start at multiples of 4, and so do shares.
  const FlatLayout layout(unaligned({{7}, {9}}, 3, Granularity::block(4)));
  EXPECT_THAT(offsets_of(layout), ElementsAre(0, 8));
  EXPECT_EQ(layout.padded_numel(), 24);
  EXPECT_THAT(layout.tensor_slices(kInner, {.inner = 1}), ElementsAre(TensorSlice{1, {0, 8}, 0}));
  // 12 elements of alignment and blocks of 8 agree every 24.
  const FlatLayout both({.shapes = {{5}, {5}},
                         .element_bytes = 1,
                         .align_bytes = 12,
                         .granularity = Granularity::block(8)});
  EXPECT_THAT(offsets_of(both), ElementsAre(0, 24));
}

TEST(FlatLayout, RowsOfDifferentLengthGetSegmentsOfTheirOwn) {
  // 8 rows of 5 and 8 rows of 3 on 4 ranks: two of each per rank, no padding at all. One segment
  // would have to be cut at multiples of 15: 4 * 30 elements for 64.
  const FlatLayout layout(unaligned({{8, 3}, {8, 5}}, 4, Granularity::row()));
  EXPECT_EQ(layout.padded_numel(), 64);
  EXPECT_EQ(layout.lower_bound_numel(), 64);
  EXPECT_THAT(offsets_of(layout), ElementsAre(40, 0)) << "the longest rows come first";
  ASSERT_EQ(layout.segments().size(), 2u);
  // A shard is its part of every segment, one after another.
  EXPECT_THAT(layout.shard_ranges(kInner, {.inner = 1}),
              ElementsAre(ShardRange{{10, 20}, 0, 0}, ShardRange{{46, 52}, 10, 1}));
  EXPECT_THAT(layout.tensor_slices(kInner, {.inner = 1}),
              ElementsAre(TensorSlice{1, {10, 20}, 0}, TensorSlice{0, {6, 12}, 10}));
}

// Cut at multiples of a common row length, as other layouts do, the padding would be 300 %.
TEST(FlatLayout, RowsWithoutCommonDivisorsArePaddedByNothing) {
  for (const int64_t ranks : {8, 512}) {
    const FlatLayout layout(unaligned({{4096, 4096}, {4096, 4097}}, ranks, Granularity::row()));
    EXPECT_EQ(layout.padded_numel(), layout.tensor_numel()) << ranks;
  }
}

TEST(FlatLayout, SmallTensorsFillTheFreeEndsOfRowSegments) {
  // 7 rows of 4 on 4 ranks leave one row free: the vector and the single row of 2 fit there.
  const FlatLayout layout(unaligned({{2}, {7, 4}, {1, 2}}, 4, Granularity::row()));
  EXPECT_EQ(layout.padded_numel(), 32);
  EXPECT_EQ(layout.segments().size(), 1u);
  EXPECT_EQ(layout.padded_numel(), layout.tensor_numel());
}

TEST(FlatLayout, FewRanksNeedOneSegmentOnly) {
  // A tensor that meets a single cut is moved so that the cut falls between two of its rows: 10
  // more elements of padding are worth two segments fewer.
  const FlatLayout layout(unaligned({{10000, 7}, {10000, 5}, {10000, 3}}, 2, Granularity::row()));
  EXPECT_EQ(layout.segments().size(), 1u);
  EXPECT_EQ(layout.padded_numel(), 150000);
}

TEST(FlatLayout, RowsLongerThanAShareLeaveRanksEmpty) {
  // Grouped experts [256, 4096, 7168] and [256, 7168, 2048] on 512 ranks: a row is one expert, so a
  // share cannot be shorter than the larger one; everything else fits beside it.
  const FlatLayout layout({.shapes = {{256, 4096, 7168}, {256, 7168, 2048}, {7168}, {7168, 16384}},
                           .element_bytes = 2,
                           .inner_ranks = 512,
                           .granularity = Granularity::row()});
  EXPECT_EQ(layout.max_shard_numel(kInner), 4096 * 7168);
  EXPECT_EQ(layout.padded_numel(), layout.lower_bound_numel());
}

TEST(FlatLayout, WholeTensorsAreBalancedOverRanks) {
  // Largest first to the least loaded: 9 | 7 | 6, then 4 to the third, 3 to the second, 2 to the
  // first.
  const FlatLayout layout(
      unaligned({{2}, {3, 3}, {4}, {7}, {3, 1}, {6}, {}}, 3, Granularity::tensor()));
  EXPECT_FALSE(layout.has_even_shards());
  EXPECT_EQ(layout.padded_numel(), layout.tensor_numel());
  EXPECT_THAT(layout.tensor_slices(kInner, {.inner = 0}),
              ElementsAre(TensorSlice{0, {0, 2}, 0}, TensorSlice{1, {0, 9}, 2}));
  EXPECT_THAT(layout.tensor_slices(kInner, {.inner = 1}),
              ElementsAre(TensorSlice{3, {0, 7}, 0}, TensorSlice{4, {0, 3}, 7},
                          TensorSlice{6, {0, 1}, 10}));
  EXPECT_THAT(layout.tensor_slices(kInner, {.inner = 2}),
              ElementsAre(TensorSlice{2, {0, 4}, 0}, TensorSlice{5, {0, 6}, 4}));
  EXPECT_EQ(layout.max_shard_numel(kInner), 11);
}

TEST(FlatLayout, WholeTensorsGoWhereLeastIsHeldAlready) {
  FlatLayoutRequest request = unaligned({{5}, {6}}, 4, Granularity::tensor());
  request.held_load = {7, 0, 9, 2};
  const FlatLayout layout(request);
  EXPECT_EQ(layout.shard_numel(kInner, {.inner = 0}), 0);
  EXPECT_EQ(layout.shard_numel(kInner, {.inner = 1}), 6);
  EXPECT_EQ(layout.shard_numel(kInner, {.inner = 2}), 0);
  EXPECT_EQ(layout.shard_numel(kInner, {.inner = 3}), 5);

  // Inner ranks are compared by what their outer ranks hold together, then these among themselves.
  request.inner_ranks = 2;
  request.outer_ranks = 2;
  request.held_load = {10, 0, 1, 2};
  request.shapes = {{8}};
  EXPECT_EQ(FlatLayout(request).shard_numel(kBoth, {.outer = 0, .inner = 1}), 8);
}

// A stack of equal units: without held_load, rank 0 would own the largest tensor of each.
TEST(FlatLayout, WholeTensorsOfManyGroupsEvenOut) {
  constexpr int64_t kRanks = 6;
  FlatLayoutRequest request = unaligned({{100}, {50}, {30}, {5}}, kRanks, Granularity::tensor());
  request.held_load.assign(kRanks, 0);
  for (int unit = 0; unit < 60; ++unit) {
    const FlatLayout layout(request);
    for (int64_t rank = 0; rank < kRanks; ++rank)
      request.held_load[static_cast<size_t>(rank)] += layout.shard_numel(kInner, {.inner = rank});
  }
  // 60 units of 185 elements on 6 ranks: 1850 each, give or take one largest tensor.
  for (const int64_t held : request.held_load) EXPECT_NEAR(held, 1850, 100);
}

TEST(FlatLayout, WholeTensorsLeaveSomeRanksWithoutAny) {
  FlatLayoutRequest request = unaligned({{5}, {6}}, 2, Granularity::tensor());
  request.outer_ranks = 2;
  const FlatLayout layout(request);
  EXPECT_EQ(layout.shard_numel(kInner, {.inner = 0}), 6);
  EXPECT_EQ(layout.shard_numel(kBoth, {.outer = 0, .inner = 1}), 5);
  EXPECT_EQ(layout.shard_numel(kBoth, {.outer = 1, .inner = 1}), 0);
  EXPECT_THAT(layout.shard_ranges(kBoth, {.outer = 1, .inner = 1}), IsEmpty());
  EXPECT_EQ(layout.max_shard_numel(kBoth), 6);
  EXPECT_EQ(layout.max_shard_numel(kOuter), 11);
}

TEST(FlatLayout, NothingToPlaceMakesAnEmptyBuffer) {
  for (const Granularity granularity :
       {Granularity::element(), Granularity::row(), Granularity::block(3), Granularity::tensor()}) {
    for (const auto& shapes : {std::vector<std::vector<int64_t>>{}, {{0}, {4, 0, 2}}}) {
      const FlatLayout layout(unaligned(shapes, 3, granularity));
      EXPECT_EQ(layout.padded_numel(), 0);
      EXPECT_EQ(layout.lower_bound_numel(), 0);
      EXPECT_EQ(layout.max_shard_numel(kInner), 0);
      EXPECT_THAT(layout.shard_ranges(kInner, {.inner = 2}), IsEmpty());
      EXPECT_THAT(layout.tensor_slices(kReplicated, {}), IsEmpty());
    }
  }
}

TEST(FlatLayout, PlanningDoesNotDependOnTheNumberOfRanks) {
  // 16 million ranks, a thousand times: anything proportional to them would be noticed.
  for (const Granularity granularity : {Granularity::element(), Granularity::row(),
                                        Granularity::block(32), Granularity::tensor()}) {
    const FlatLayoutRequest request{.shapes = {{1 << 20, 4096}, {4096, 128}, {7}},
                                    .element_bytes = 2,
                                    .inner_ranks = 1 << 22,
                                    .outer_ranks = 4,
                                    .granularity = granularity};
    for (int i = 0; i < 1000; ++i) {
      const FlatLayout layout(request);
      EXPECT_LE(layout.tensor_slices(kBoth, {.outer = 3, .inner = i * 4096}).size(), 3u);
      EXPECT_GE(layout.max_shard_numel(kInner), layout.max_shard_numel(kBoth));
    }
  }
}

TEST(FlatLayout, RefusesBadRequestsWithASentence) {
  const auto refusal = [](FlatLayoutRequest request) { return [request] { FlatLayout{request}; }; };
  const FlatLayoutRequest good{.shapes = {{4, 4}}, .element_bytes = 2};
  EXPECT_NO_THROW(refusal(good)());

  FlatLayoutRequest bad = good;
  bad.element_bytes = 0;
  EXPECT_THAT(refusal(bad), ThrowsMessage<Error>(HasSubstr("element_bytes is 0")));
  bad = good;
  bad.element_bytes = 3;
  EXPECT_THAT(refusal(bad),
              ThrowsMessage<Error>(AllOf(HasSubstr("align_bytes is 128"),
                                         HasSubstr("not a multiple of element_bytes 3"))));
  bad = good;
  bad.inner_ranks = 0;
  EXPECT_THAT(refusal(bad), ThrowsMessage<Error>(HasSubstr("inner_ranks is 0; use 1 to 16777216")));
  bad = good;
  bad.inner_ranks = 1 << 20;
  bad.outer_ranks = 17;
  EXPECT_THAT(refusal(bad), ThrowsMessage<Error>(HasSubstr("outer_ranks is 17; use 1 to 16")));
  bad = good;
  bad.granularity = Granularity::block(0);
  EXPECT_THAT(refusal(bad), ThrowsMessage<Error>(HasSubstr("block has 0 elements; use 1 or more")));
  bad = good;
  bad.shapes.push_back({3, -1});
  EXPECT_THAT(refusal(bad),
              ThrowsMessage<Error>(HasSubstr("dim 1 of tensor 1 with shape [3, -1]")));
  bad = good;
  bad.shapes.push_back({int64_t{1} << 40, int64_t{1} << 40});
  EXPECT_THAT(refusal(bad),
              ThrowsMessage<Error>(AllOf(HasSubstr("tensor 1"), HasSubstr("split it"))));
  bad = good;
  bad.shapes.assign(12, {int64_t{1} << 56});
  EXPECT_THAT(refusal(bad), ThrowsMessage<Error>(HasSubstr("split it into several groups")));
  bad = good;
  bad.shapes.push_back({int64_t{1} << 40, int64_t{1} << 40, 0});
  EXPECT_NO_THROW(refusal(bad)()) << "no elements, whatever the other dims";
}

TEST(FlatLayout, RefusesRanksItDoesNotHave) {
  const FlatLayout layout(unaligned({{8}}, 2));
  EXPECT_THAT([&] { layout.shard_ranges(kInner, {.inner = 2}); },
              ThrowsMessage<Error>(HasSubstr("inner rank 2 does not exist")));
  EXPECT_THAT([&] { layout.shard_numel(kInner, {.outer = 1}); },
              ThrowsMessage<Error>(HasSubstr("outer rank 1 does not exist")));
}

TEST(Granularity, TextRoundTrips) {
  for (const Granularity granularity : {Granularity::element(), Granularity::row(),
                                        Granularity::block(128), Granularity::tensor()}) {
    EXPECT_EQ(parse_granularity(to_text(granularity)), granularity);
  }
  EXPECT_THAT([] { parse_granularity("rows"); },
              ThrowsMessage<UsageError>(HasSubstr("did you mean 'row'?")));
  for (const char* bad :
       {"", "block", "block()", "block(0)", "block(-1)", "block(2", "block(2x)"}) {
    EXPECT_THROW(parse_granularity(bad), UsageError) << bad;
  }
}

}  // namespace
}  // namespace fsdp::flat_layout_test
