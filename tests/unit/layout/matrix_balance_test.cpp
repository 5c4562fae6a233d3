// Matrices with one owner each: where they lie, and how evenly their products are spread.
#include "fsdp/layout/matrix_owners.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <random>

#include "fsdp/base/integer.h"
#include "fsdp/layout/flat_layout.h"

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

// --- costs ---------------------------------------------------------------------------------------

std::vector<int64_t> loads_of(std::span<const CostColumn> columns, const ColumnOwners& owners,
                              int64_t num_owners) {
  std::vector<int64_t> loads(static_cast<size_t>(num_owners), 0);
  for (size_t i = 0; i < columns.size(); ++i)
    for (size_t k = 0; k < columns[i].costs.size(); ++k)
      loads[static_cast<size_t>(owners[i][k])] += columns[i].costs[k];
  return loads;
}

TEST(MatrixBalance, DealsColumnsAsEvenlyAsTheirOrderAllows) {
  const std::vector<CostColumn> columns{{0, {144, 48, 48, 48, 48, 144}}, {1, {20, 20}}};
  const ColumnOwners owners = balance_columns(columns, 3);
  EXPECT_THAT(owners[0], ElementsAre(0, 0, 1, 1, 1, 2));
  EXPECT_THAT(owners[1], ElementsAre(1, 2));  // the first has most already
  // In order, the small ones of both groups would stand in the way of a large one: 18 for 14.
  const std::vector<CostColumn> groups{{0, {4}}, {0, {10}}, {1, {4}}, {1, {10}}};
  EXPECT_THAT(loads_of(groups, balance_columns(groups, 2), 2), ElementsAre(14, 14));
  const std::vector<CostColumn> few{{0, {5, 5}}, {1, {3}}};
  const std::vector<int64_t> loads = loads_of(few, balance_columns(few, 1000), 1000);
  EXPECT_EQ(std::count(loads.begin(), loads.end(), 0), 997) << "owners without a matrix";
}

// One owner of all three would do as well for the whole, but the group's reduction would wait for
// it.
TEST(MatrixBalance, NoOwnerHasMoreOfAGroupThanNeeded) {
  std::vector<CostColumn> columns;
  for (int64_t group = 0; group < 12; ++group) {
    columns.push_back({group, {1}});
    columns.push_back({group, {10, 10}});
    columns.push_back({group, {10}});
  }
  const ColumnOwners owners = balance_columns(columns, 9);
  EXPECT_THAT(loads_of(columns, owners, 9), ::testing::Each(::testing::Le(42)));
  for (size_t i = 0; i < columns.size(); i += 3) {
    const std::span<const CostColumn> group = std::span(columns).subspan(i, 3);
    const ColumnOwners of_group(owners.begin() + static_cast<std::ptrdiff_t>(i),
                                owners.begin() + static_cast<std::ptrdiff_t>(i) + 3);
    EXPECT_THAT(loads_of(group, of_group, 9), ::testing::Each(::testing::Le(11)));
  }
}

// Owners ascend in a column, those of two columns of a group have one in common at most, at the
// edge; nobody has more than the mean and one cost; and the same comes out again.
TEST(MatrixBalance, KeepsItsPromisesForAnyColumns) {
  std::mt19937 random(7);
  const auto below = [&](int64_t n) {
    return static_cast<int64_t>(random() % static_cast<uint64_t>(n));
  };
  int num_in_other_order = 0;
  for (int round = 0; round < 500; ++round) {
    std::vector<CostColumn> columns;
    const int64_t num_groups = 1 + below(8);
    for (int64_t group = 0; group < num_groups; ++group)
      for (int64_t i = below(5); i >= 0; --i) {
        CostColumn& column = columns.emplace_back();
        column.group = group;
        const int64_t cost = below(100);
        for (int64_t k = below(3) == 0 ? below(20) : 0; k >= 0; --k)
          column.costs.push_back(cost + below(2));
      }
    const int64_t num_owners = 1 + below(24);
    const ColumnOwners owners = balance_columns(columns, num_owners);
    ASSERT_EQ(owners, balance_columns(columns, num_owners));
    int64_t largest = 0;
    int64_t total = 0;
    for (size_t i = 0; i < columns.size(); ++i) {
      ASSERT_EQ(owners[i].size(), columns[i].costs.size());
      ASSERT_TRUE(std::is_sorted(owners[i].begin(), owners[i].end()));
      ASSERT_GE(owners[i].front(), 0);
      ASSERT_LT(owners[i].back(), num_owners);
      for (const int64_t cost : columns[i].costs) {
        largest = std::max(largest, cost);
        total += cost;
      }
      for (size_t other = 0; other < i; ++other)
        if (columns[other].group == columns[i].group) {
          const bool is_after = owners[i].front() >= owners[other].back();
          ASSERT_TRUE(is_after || owners[i].back() <= owners[other].front());
          num_in_other_order += is_after ? 0 : 1;
        }
    }
    const std::vector<int64_t> loads = loads_of(columns, owners, num_owners);
    EXPECT_LE(*std::max_element(loads.begin(), loads.end()), ceil_div(total, num_owners) + largest);
  }
  EXPECT_GT(num_in_other_order, 100);
}

// 100 units with two banks of 512 experts on 4096 ranks; anything slow would be noticed.
TEST(MatrixBalance, DealsManyMatricesToManyOwners) {
  std::vector<CostColumn> columns;
  for (int64_t unit = 0; unit < 100; ++unit) {
    columns.push_back({unit, {600, 28, 28}});
    columns.push_back({unit, {600}});
    columns.push_back({unit, std::vector<int64_t>(1024, 300)});
    columns.push_back({unit, std::vector<int64_t>(512, 301)});
  }
  const std::vector<int64_t> loads = loads_of(columns, balance_columns(columns, 4096), 4096);
  const int64_t mean = std::accumulate(loads.begin(), loads.end(), int64_t{0}) / 4096;
  EXPECT_LE(*std::max_element(loads.begin(), loads.end()), mean + mean / 20);
}

// --- layouts -------------------------------------------------------------------------------------

TEST(MatrixOwners, TensorsLieInTheOrderOfTheirOwners) {
  FlatLayoutRequest request = of_matrices({{2, 8}, {8, 2}, {2, 8}}, {{}, {2}, {}}, 4);
  request.matrix_owners = {{3}, {1, 1, 1, 3}, {0}};
  const FlatLayout layout(request);
  EXPECT_EQ(layout.tensor_range(2), (FlatRange{0, 16}));
  EXPECT_EQ(layout.tensor_range(1), (FlatRange{16, 32}));
  EXPECT_EQ(layout.tensor_range(0), (FlatRange{32, 48}));
  EXPECT_THAT(layout.tensor_slices(kInner, {.inner = 0}), ElementsAre(TensorSlice{2, {0, 16}, 0}));
  EXPECT_THAT(layout.tensor_slices(kInner, {.inner = 1}), ElementsAre(TensorSlice{1, {0, 12}, 0}));
  EXPECT_EQ(layout.shard_numel(kInner, {.inner = 2}), 0);
  EXPECT_THAT(layout.tensor_slices(kInner, {.inner = 3}),
              ElementsAre(TensorSlice{1, {12, 16}, 0}, TensorSlice{0, {0, 16}, 4}));
}

TEST(MatrixOwners, GoByCostAndNotByElements) {
  // 64 x 64 costs 6 * 64^3; 8 x 1024 has twice the elements and costs less than a tenth.
  const FlatLayout layout(of_matrices({{64, 64}, {8, 1024}, {8, 1024}}, {{}, {}, {}}, 2));
  EXPECT_EQ(layout.shard_numel(kInner, {.inner = 0}), 64 * 64);
  EXPECT_EQ(layout.shard_numel(kInner, {.inner = 1}), 2 * 8 * 1024);
}

TEST(MatrixOwners, OfMatricesThatMeetUnalignedAreTheSame) {
  FlatLayoutRequest request = of_matrices({{8, 3}}, {{2}}, 4);
  request.align_bytes = 4;  // matrices of 6 elements: only every second one ends aligned
  const FlatLayout layout(request);
  EXPECT_EQ(layout.shard_numel(kInner, {.inner = 0}), 12);
  EXPECT_EQ(layout.shard_numel(kInner, {.inner = 1}), 12);
  EXPECT_EQ(layout.max_shard_numel(kInner), 12);
}

// Random models of random matrices, banks of experts among them: every matrix is whole on the rank
// that the deal says, on either mesh, and no inner rank has more than the mean and one matrix.
TEST(MatrixOwners, HaveWholeMatricesOnAnyMesh) {
  std::mt19937 random(11);
  const auto below = [&](int64_t n) {
    return static_cast<int64_t>(random() % static_cast<uint64_t>(n));
  };
  for (int round = 0; round < 300; ++round) {
    FlatLayoutRequest empty = of_matrices({}, {}, 1 + below(round % 3 == 0 ? 40 : 7));
    empty.outer_ranks = 1 + below(3);
    empty.align_bytes = int64_t{1} << below(5);
    std::vector<FlatLayoutRequest> groups(static_cast<size_t>(1 + below(4)), empty);
    std::vector<FlatLayoutRequest*> requests;
    for (FlatLayoutRequest& group : groups) {
      const int64_t num_tensors = 1 + below(5);
      for (int64_t i = 0; i < num_tensors; ++i) {
        const int64_t rows = 1 + below(9);
        group.shapes.push_back({rows * (1 + below(below(4) == 0 ? 12 : 2)), 1 + below(20)});
        group.matrix_rows.push_back({rows});
      }
      requests.push_back(&group);
    }
    deal_matrices(requests);
    const std::vector<FlatLayoutRequest> before = groups;
    deal_matrices(requests);
    std::vector<int64_t> load(static_cast<size_t>(empty.inner_ranks), 0);
    int64_t largest = 0;
    for (size_t g = 0; g < groups.size(); ++g) {
      ASSERT_EQ(groups[g].matrix_owners, before[g].matrix_owners);
      const FlatLayout layout(groups[g]);
      for (int64_t tensor = 0; tensor < layout.num_tensors(); ++tensor) {
        const std::vector<OwnedMatrix> parts = layout.matrices_of(tensor);
        for (size_t i = 0; i < parts.size(); ++i) {
          const int64_t share = groups[g].matrix_owners[static_cast<size_t>(tensor)][i];
          const MeshCoordinate owner{.outer = share % empty.outer_ranks,
                                     .inner = share / empty.outer_ranks};
          for (const PlacementPair placed : {kInner, kBoth}) {
            const std::vector<TensorSlice> held = layout.tensor_slices(placed, owner, tensor);
            ASSERT_EQ(held.size(), 1u);
            EXPECT_EQ(intersect(held[0].range, parts[i].range), parts[i].range);
          }
          const int64_t cost = newton_schulz_flops(parts[i].rows, parts[i].columns);
          load[static_cast<size_t>(owner.inner)] += cost;
          largest = std::max(largest, cost);
        }
      }
    }
    if (empty.align_bytes > 1) continue;  // then matrices may be tied together
    const int64_t total = std::accumulate(load.begin(), load.end(), int64_t{0});
    EXPECT_LE(*std::max_element(load.begin(), load.end()),
              ceil_div(total, empty.inner_ranks) + largest);
  }
}

}  // namespace
}  // namespace fsdp::matrix_balance_test
