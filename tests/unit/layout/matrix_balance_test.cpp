// Matrices with one owner each: where they lie, and how evenly their products are spread.
#include "fsdp/layout/matrix_balance.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <random>

#include "fsdp/base/error.h"
#include "fsdp/layout/flat_layout.h"
#include "fsdp/layout/matrix_parts.h"

namespace fsdp::matrix_balance_test {
namespace {

using ::testing::ElementsAre;

constexpr PlacementPair kInner{Placement::kReplicate, Placement::kShard};
constexpr PlacementPair kBoth{Placement::kShard, Placement::kShard};

FlatLayoutRequest of_matrices(std::vector<std::vector<int64_t>> shapes,
                              std::vector<std::vector<int64_t>> rows, int64_t inner_ranks) {
  return {.shapes = std::move(shapes),
          .element_bytes = 1,
          .inner_ranks = inner_ranks,
          .align_bytes = 1,
          .granularity = Granularity::tensor(),
          .matrix_rows = std::move(rows)};
}

TEST(MatrixParts, AreTheRowsOneBelowTheOther) {
  const std::vector<int64_t> fused{8, 3};
  EXPECT_THAT(matrix_parts(fused, {}), ElementsAre(OwnedMatrix{{0, 24}, 8, 3}));
  const std::vector<int64_t> rows{5, 2, 1};
  EXPECT_THAT(matrix_parts(fused, rows),
              ElementsAre(OwnedMatrix{{0, 15}, 5, 3}, OwnedMatrix{{15, 21}, 2, 3},
                          OwnedMatrix{{21, 24}, 1, 3}));
  // A bank of experts: the rows of one, for as many as there are.
  const std::vector<int64_t> of_expert{2};
  EXPECT_EQ(matrix_parts(fused, of_expert).size(), 4);
  const std::vector<int64_t> stacked{3, 4, 5};
  EXPECT_THAT(matrix_parts(stacked, {}),
              ElementsAre(OwnedMatrix{{0, 20}, 4, 5}, OwnedMatrix{{20, 40}, 4, 5},
                          OwnedMatrix{{40, 60}, 4, 5}));
}

TEST(MatrixParts, CostTheirProducts) {
  // X X^T: 2 * 4 * 4 * 10, A A: 2 * 4 * 4 * 4, B X: 2 * 4 * 4 * 10.
  EXPECT_EQ(newton_schulz_flops(4, 10), 320 + 128 + 320);
  EXPECT_EQ(newton_schulz_flops(10, 4), newton_schulz_flops(4, 10));
  EXPECT_EQ(newton_schulz_numel(10, 4), 2 * 40 + 2 * 16);
}

TEST(MatrixBalance, OwnersGetRunsOfMatricesThatCostAlike) {
  // Two wide matrices cost 2 * 4 * (16 + 2) = 144 each, four small ones 48 each.
  const FlatLayout layout(of_matrices({{2, 8}, {8, 2}, {2, 8}}, {{}, {2}, {}}, 3));
  EXPECT_THAT(layout.tensor_slices(kInner, {.inner = 0}),
              ElementsAre(TensorSlice{0, {0, 16}, 0}, TensorSlice{1, {0, 4}, 16}));
  EXPECT_THAT(layout.tensor_slices(kInner, {.inner = 1}), ElementsAre(TensorSlice{1, {4, 16}, 0}));
  EXPECT_THAT(layout.tensor_slices(kInner, {.inner = 2}), ElementsAre(TensorSlice{2, {0, 16}, 0}));
  std::vector<int64_t> load(3, 0);
  add_matrix_load(layout, load);
  EXPECT_THAT(load, ElementsAre(192, 144, 144));
}

TEST(MatrixBalance, GoesByCostAndNotByElements) {
  // 64 x 64 costs 6 * 64^3; 8 x 1024 has twice the elements and costs less than a tenth.
  const FlatLayout layout(of_matrices({{64, 64}, {8, 1024}, {8, 1024}}, {{}, {}, {}}, 2));
  EXPECT_EQ(layout.shard_numel(kInner, {.inner = 0}), 64 * 64);
  EXPECT_EQ(layout.shard_numel(kInner, {.inner = 1}), 2 * 8 * 1024);
}

TEST(MatrixBalance, OwnersWithMuchOfOtherGroupsGetNothing) {
  FlatLayoutRequest request = of_matrices({{4, 4}, {4, 4}}, {{}, {}}, 4);
  request.held_load = {500, 0, 900, 100};
  const FlatLayout layout(request);
  EXPECT_EQ(layout.shard_numel(kInner, {.inner = 0}), 0);
  EXPECT_EQ(layout.shard_numel(kInner, {.inner = 1}), 16);
  EXPECT_EQ(layout.shard_numel(kInner, {.inner = 2}), 0);
  EXPECT_EQ(layout.shard_numel(kInner, {.inner = 3}), 16);
}

TEST(MatrixBalance, MatricesThatMeetUnalignedHaveOneOwner) {
  FlatLayoutRequest request = of_matrices({{8, 3}}, {{2}}, 4);
  request.align_bytes = 4;  // matrices of 6 elements: only every second one ends aligned
  const FlatLayout layout(request);
  EXPECT_EQ(layout.shard_numel(kInner, {.inner = 0}), 12);
  EXPECT_EQ(layout.shard_numel(kInner, {.inner = 1}), 12);
  EXPECT_EQ(layout.max_shard_numel(kInner), 12);
}

TEST(MatrixBalance, RefusesRowsForOtherTensors) {
  EXPECT_THROW(FlatLayout(of_matrices({{4, 4}, {4, 4}}, {{}}, 2)), Error);
}

// Random groups of random matrices: every matrix is whole on one rank of either mesh, and no owner
// has more than the mean and one matrix.
TEST(MatrixBalance, KeepsMatricesWholeOnAnyMesh) {
  std::mt19937 random(11);
  const auto below = [&](int64_t n) {
    return static_cast<int64_t>(random() % static_cast<uint64_t>(n));
  };
  for (int round = 0; round < 300; ++round) {
    FlatLayoutRequest request = of_matrices({}, {}, 1 + below(7));
    request.outer_ranks = 1 + below(3);
    request.align_bytes = int64_t{1} << below(5);
    const int64_t num_tensors = 1 + below(6);
    for (int64_t i = 0; i < num_tensors; ++i) {
      const int64_t rows = 1 + below(9);
      request.shapes.push_back({rows * (1 + below(6)), 1 + below(20)});
      request.matrix_rows.push_back({rows});
    }
    const int64_t num_ranks = request.inner_ranks * request.outer_ranks;
    std::vector<int64_t> load(static_cast<size_t>(num_ranks), 0);
    for (int group = 0; group < 4; ++group) {
      request.held_load = load;
      const FlatLayout layout(request);
      add_matrix_load(layout, load);
      for (int64_t tensor = 0; tensor < layout.num_tensors(); ++tensor)
        for (const OwnedMatrix& part : layout.matrices_of(tensor)) {
          int64_t owners = 0;
          for (int64_t rank = 0; rank < num_ranks; ++rank)
            for (const TensorSlice& slice : layout.tensor_slices(
                     kBoth,
                     {.outer = rank % request.outer_ranks, .inner = rank / request.outer_ranks},
                     tensor)) {
              const FlatRange common = intersect(slice.range, part.range);
              ASSERT_TRUE(common.empty() || common == part.range);
              owners += common.empty() ? 0 : 1;
            }
          ASSERT_EQ(owners, 1);
        }
    }
    if (request.align_bytes > 1) continue;  // then matrices may be tied together
    int64_t largest = 0;
    for (size_t i = 0; i < request.shapes.size(); ++i)
      largest =
          std::max(largest, newton_schulz_flops(request.matrix_rows[i][0], request.shapes[i][1]));
    int64_t most = 0;
    int64_t total = 0;
    for (int64_t inner = 0; inner < request.inner_ranks; ++inner) {
      const auto first = load.begin() + inner * request.outer_ranks;
      const int64_t of_inner = std::accumulate(first, first + request.outer_ranks, int64_t{0});
      most = std::max(most, of_inner);
      total += of_inner;
    }
    EXPECT_LE(most, total / request.inner_ranks + largest);
  }
}

}  // namespace
}  // namespace fsdp::matrix_balance_test
