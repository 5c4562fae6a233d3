// Megatron-FSDP's flat layout on its own worked examples, and ours on the same shapes beside it.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <list>
#include <numeric>

#include "fsdp/base/integer.h"
#include "fsdp/layout/flat_layout.h"

namespace fsdp::peer_layout_test {
namespace {

using ::testing::ElementsAre;

using Shapes = std::vector<std::vector<int64_t>>;

int64_t numel_of(const std::vector<int64_t>& shape) {
  return std::accumulate(shape.begin(), shape.end(), int64_t{1}, std::multiplies<>());
}
int64_t row_of(const std::vector<int64_t>& shape) {
  return std::accumulate(shape.begin() + 1, shape.end(), int64_t{1}, std::multiplies<>());
}

struct PeerLayout {
  int64_t chunk_numel = 1;  // least common multiple of all rows: what a shard is a multiple of
  std::vector<int64_t> offsets;
  int64_t numel = 0;
  double padding = 0;
};

// One flat range cut at multiples of the common row length. Tensors shorter than it fill gaps, in
// the order given; two longer ones share a chunk where their remainders allow it.
PeerLayout peer_layout(const Shapes& shapes, int64_t num_ranks) {
  PeerLayout peer{.offsets = std::vector<int64_t>(shapes.size(), -1)};
  for (const auto& shape : shapes) peer.chunk_numel = checked_lcm(peer.chunk_numel, row_of(shape));
  const int64_t chunk = peer.chunk_numel;
  std::list<size_t> fragments;
  std::list<size_t> regular;
  for (size_t i = 0; i < shapes.size(); ++i) {
    (numel_of(shapes[i]) < chunk ? fragments : regular).push_back(i);
  }
  int64_t at = 0;
  while (!regular.empty()) {
    const int64_t first = numel_of(shapes[regular.front()]);
    peer.offsets[regular.front()] = at;
    regular.pop_front();
    int64_t gap = at + first;
    at += round_up(first, chunk);
    int64_t space = at - gap;
    if (space == 0) continue;
    const auto partner = std::find_if(regular.begin(), regular.end(), [&](size_t i) {
      const int64_t rest = numel_of(shapes[i]) % chunk;
      return rest != 0 && rest <= space;
    });
    if (partner != regular.end()) {
      const int64_t numel = numel_of(shapes[*partner]);
      peer.offsets[*partner] = at - numel % chunk;
      space -= numel % chunk;
      at += numel / chunk * chunk;
      regular.erase(partner);
    }
    for (auto it = fragments.begin(); it != fragments.end();) {
      const int64_t numel = numel_of(shapes[*it]);
      if (numel > space) {
        ++it;
        continue;
      }
      peer.offsets[*it] = gap;
      gap += numel;
      space -= numel;
      it = fragments.erase(it);
    }
  }
  for (const size_t i : fragments) {
    peer.offsets[i] = at;
    at += numel_of(shapes[i]);
  }
  peer.numel = round_up(at, num_ranks * chunk);
  int64_t sum = 0;
  for (const auto& shape : shapes) sum += numel_of(shape);
  peer.padding = static_cast<double>(peer.numel) / static_cast<double>(sum) - 1;
  return peer;
}

// Ours, aligned to 128 bytes of bf16 unless told otherwise.
double padding_of(const Shapes& shapes, int64_t num_ranks, Granularity granularity,
                  int64_t align_bytes = 128) {
  const FlatLayout layout({.shapes = shapes,
                           .element_bytes = 2,
                           .inner_ranks = num_ranks,
                           .align_bytes = align_bytes,
                           .granularity = granularity});
  return static_cast<double>(layout.padding_numel()) / static_cast<double>(layout.tensor_numel());
}

TEST(PeerLayout, WorkedExampleOfFiveTensorsOnFiveRanks) {
  const Shapes shapes = {{2, 6}, {4, 4}, {4, 4}, {1, 2}, {1, 6}};
  const PeerLayout peer = peer_layout(shapes, 5);
  EXPECT_EQ(peer.chunk_numel, 12);
  EXPECT_THAT(peer.offsets, ElementsAre(0, 12, 32, 28, 48));
  EXPECT_EQ(peer.numel, 60);

  // Ours without alignment: 52 elements on 5 ranks need shares of 11, rows or not.
  const FlatLayoutRequest request{
      .shapes = shapes, .element_bytes = 2, .inner_ranks = 5, .align_bytes = 2};
  EXPECT_EQ(FlatLayout(request).padded_numel(), 55);
  FlatLayoutRequest by_row = request;
  by_row.granularity = Granularity::row();
  const FlatLayout rows(by_row);
  EXPECT_LE(rows.padded_numel(), 60);
  EXPECT_GE(rows.lower_bound_numel(), 55);
}

TEST(PeerLayout, PaddingGrowsToAHundredPercentWithTheRanks) {
  const Shapes shapes = {{11008, 4096}, {4096, 11008}, {4096}};
  EXPECT_EQ(peer_layout(shapes, 8).chunk_numel, 176128);
  EXPECT_NEAR(peer_layout(shapes, 8).padding, 0.016, 0.0005);
  EXPECT_NEAR(peer_layout(shapes, 64).padding, 0.125, 0.0005);
  EXPECT_NEAR(peer_layout(shapes, 512).padding, 1.00, 0.0005);

  EXPECT_LT(padding_of(shapes, 8, Granularity::element()), 0.0001);
  EXPECT_LT(padding_of(shapes, 64, Granularity::element()), 0.0001);
  EXPECT_LT(padding_of(shapes, 512, Granularity::element()), 0.0004);
  EXPECT_LT(padding_of(shapes, 8, Granularity::row()), 0.001);
  EXPECT_LT(padding_of(shapes, 64, Granularity::row()), 0.001);
  // The two matrices are exactly 512 times the common row length; only the vector is padded, to 64
  // elements per rank.
  EXPECT_LT(padding_of(shapes, 512, Granularity::row()), 0.0004);
}

TEST(PeerLayout, RowsWithoutCommonDivisorsCostThreeHundredPercent) {
  const Shapes shapes = {{4096, 4096}, {4096, 4097}};
  EXPECT_EQ(peer_layout(shapes, 8).chunk_numel, 4096 * 4097);
  EXPECT_NEAR(peer_layout(shapes, 8).padding, 3.0, 0.001);

  EXPECT_LT(padding_of(shapes, 8, Granularity::element()), 0.0001);
  EXPECT_EQ(padding_of(shapes, 8, Granularity::row()), 0.0);
  EXPECT_EQ(padding_of(shapes, 512, Granularity::row(), 2), 0.0);
  // 64 rows of 4097 make the next multiple of 128 bytes, so 512 ranks cannot all have some of them.
  EXPECT_GT(padding_of(shapes, 512, Granularity::row()), 2.0);
}

TEST(PeerLayout, TailFragmentsAreCutInTheMiddleOfARow) {
  const Shapes shapes = {{3, 7}, {3, 4}};
  const PeerLayout peer = peer_layout(shapes, 4);
  EXPECT_THAT(peer.offsets, ElementsAre(0, 21));
  const int64_t boundary = peer.numel / 4;
  EXPECT_EQ(boundary, 28);
  EXPECT_NE((boundary - peer.offsets[1]) % row_of(shapes[1]), 0) << "7 elements: row 1, column 3";

  const FlatLayout ours({.shapes = shapes,
                         .element_bytes = 2,
                         .inner_ranks = 4,
                         .align_bytes = 2,
                         .granularity = Granularity::row()});
  for (int64_t rank = 0; rank < 4; ++rank) {
    const PlacementPair placed{Placement::kReplicate, Placement::kShard};
    for (const TensorSlice& slice : ours.tensor_slices(placed, {.inner = rank})) {
      const int64_t row = row_of(shapes[static_cast<size_t>(slice.tensor)]);
      EXPECT_EQ(slice.range.begin % row, 0);
      EXPECT_EQ(slice.range.end % row, 0);
    }
  }
  EXPECT_LT(ours.padded_numel(), peer.numel);
}

}  // namespace
}  // namespace fsdp::peer_layout_test
