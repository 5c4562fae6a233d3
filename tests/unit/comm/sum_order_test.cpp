// Groups of neighbours and pieces of shares, at sizes that no test can run.
#include "fsdp/comm/reduce/sum_order.h"

#include <gtest/gtest.h>

#include <vector>

#include "fsdp/base/error.h"

namespace fsdp::sum_order_test {
namespace {

// `runs` blocks, of so many ranks each.
std::vector<int> blocks(const std::vector<int>& runs) {
  std::vector<int> blocks;
  for (size_t block = 0; block < runs.size(); ++block)
    blocks.insert(blocks.end(), static_cast<size_t>(runs[block]), static_cast<int>(block));
  return blocks;
}

TEST(SumOrder, HasTheLargestGroupsThatNoBlockCuts) {
  EXPECT_EQ(group_within(blocks({8, 8, 8})), 8);
  EXPECT_EQ(group_within(blocks({8})), 8);
  EXPECT_EQ(group_within(blocks({4, 2})), 2);
  EXPECT_EQ(group_within(blocks({2, 4})), 2);
  EXPECT_EQ(group_within(blocks({3, 4})), 1);
  EXPECT_EQ(group_within(blocks({1, 1, 1})), 1);
  EXPECT_EQ(group_within(std::vector<int>{0, 0, 1, 1, 0, 0}), 2) << "a block that comes again";
  EXPECT_EQ(group_within({}), 1);
}

TEST(SumOrder, TakesAGivenGroupThatDividesTheRanks) {
  EXPECT_EQ(chosen_group(0, blocks({4, 4})), 4);
  EXPECT_EQ(chosen_group(2, blocks({4, 4})), 2);
  EXPECT_EQ(chosen_group(8, blocks({4, 4})), 8);
  EXPECT_EQ(chosen_group(8, blocks({1})), 1) << "one rank adds nothing";
  EXPECT_THROW(chosen_group(3, blocks({4, 4})), Error);
  EXPECT_THROW(chosen_group(16, blocks({4, 4})), Error);
}

TEST(SumOrder, PlacesRanksInGroups) {
  const SumOrder order{.ranks = 12, .group = 4};
  EXPECT_TRUE(order.has_two_hops());
  for (int rank = 0; rank < 12; ++rank)
    EXPECT_EQ(order.rank_at(order.group_of(rank), order.place_of(rank)), rank);
  EXPECT_FALSE((SumOrder{.ranks = 12, .group = 12}).has_two_hops());
  EXPECT_FALSE((SumOrder{.ranks = 12, .group = 1}).has_two_hops());
}

TEST(SumOrder, IsOneForAllGroupsThatAreLevelsOfTheTree) {
  EXPECT_TRUE((SumOrder{.ranks = 16, .group = 8}).adds_like(2));
  EXPECT_TRUE((SumOrder{.ranks = 24, .group = 8}).adds_like(24));
  EXPECT_TRUE((SumOrder{.ranks = 12, .group = 3}).adds_like(3));
  EXPECT_FALSE((SumOrder{.ranks = 12, .group = 3}).adds_like(6));
  EXPECT_FALSE((SumOrder{.ranks = 12, .group = 4}).adds_like(6));
  EXPECT_FALSE((SumOrder{.ranks = 12, .group = 6}).adds_like(12));
}

TEST(ReductionPieces, FitTheirMemoryForAnyNumberOfRanks) {
  for (const int ranks : {2, 8, 33, 1024, 4096})
    for (const int group : {1, 8, ranks})
      for (const int64_t share : {int64_t{1}, int64_t{1000}, int64_t{1} << 28}) {
        if (ranks % group != 0) continue;
        const auto pieces = ReductionPieces::of({.ranks = ranks, .group = group}, share, 2, 4);
        EXPECT_LE(pieces.staging_bytes, ReductionPieces::kMostBytes) << ranks << " " << group;
        EXPECT_TRUE(pieces.numel == share || pieces.numel % 128 == 0) << ranks << " " << group;
        // Half of the memory is used, at least, where there is more than one piece.
        EXPECT_TRUE(pieces.numel == share || pieces.staging_bytes > ReductionPieces::kMostBytes / 2)
            << ranks << " " << group;
      }
  EXPECT_EQ(ReductionPieces::of({}, 1000, 2, 4).numel, 1000) << "one rank";
  EXPECT_EQ(ReductionPieces::of({}, 1000, 2, 4).staging_bytes, 0);
}

// Contributions of a group to 128 ranks, 2 bytes each; their sums, and those that come, 4 each.
TEST(ReductionPieces, CountBothHops) {
  const auto pieces = ReductionPieces::of({.ranks = 1024, .group = 8}, 1280, 2, 4);
  EXPECT_EQ(pieces.staging_bytes, 1280 * (1024 * 2 + 128 * (4 + 4)));
  EXPECT_EQ(ReductionPieces::of({.ranks = 8, .group = 8}, 1280, 2, 4).staging_bytes, 1280 * 7 * 2);
}

}  // namespace
}  // namespace fsdp::sum_order_test
