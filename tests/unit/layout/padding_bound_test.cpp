// layout/packing.h: known optima, and never above what an exhaustive search finds.
#include "fsdp/layout/packing.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <random>

#include "fsdp/base/text.h"

namespace fsdp::padding_bound_test {
namespace {

// The shortest shard into which the pieces fit, by trying every assignment to ranks.
int64_t shortest_shard(std::vector<int64_t> pieces, size_t num_ranks) {
  std::sort(pieces.begin(), pieces.end(), std::greater<>());
  std::vector<int64_t> loads(num_ranks, 0);
  int64_t best = INT64_MAX;
  std::function<void(size_t, int64_t)> assign = [&](size_t i, int64_t longest) {
    if (longest >= best) return;
    if (i == pieces.size()) {
      best = longest;
      return;
    }
    for (size_t rank = 0; rank < num_ranks; ++rank) {
      loads[rank] += pieces[i];
      assign(i + 1, std::max(longest, loads[rank]));
      loads[rank] -= pieces[i];
      if (loads[rank] == 0) break;  // the other empty ranks are the same
    }
  };
  assign(0, 0);
  return best;
}

TEST(PaddingBound, IsTheVolumeOrWholeRowsOrTheLargestPiece) {
  const std::vector<BrickedTensor> divisible = {bricked(0, 1000, 1, 64), bricked(1, 70, 1, 64)};
  EXPECT_EQ(min_shard_numel(divisible, 64, 1), 1024 + 128);
  EXPECT_EQ(min_shard_numel(divisible, 64, 5), 256);
  EXPECT_EQ(min_shard_numel({}, 64, 5), 0);
  // 10240 rows of 4096 on 4096 ranks: 2.5 rows each, so somebody has 3.
  const std::vector<BrickedTensor> attention = {bricked(0, 10240 * 4096, 4096, 64)};
  EXPECT_EQ(min_shard_numel(attention, 64, 4096), 3 * 4096);
  // 21504 rows of 4096 and 4096 rows of 21504: 10.5 times 4096 by volume. But a row of 21504 leaves
  // room for five of 4096 only, until the shard has room for eleven.
  const std::vector<BrickedTensor> mlp = {bricked(0, 21504 * 4096, 4096, 64),
                                          bricked(1, 4096 * 21504, 21504, 64)};
  EXPECT_EQ(min_shard_numel(mlp, 64, 4096), 11 * 4096);
  const std::vector<BrickedTensor> large = {bricked(0, 5000, 5000, 8), bricked(1, 64, 1, 8)};
  EXPECT_EQ(min_shard_numel(large, 8, 100), 5000);
  EXPECT_EQ(min_shard_numel(large, 8, 1), 5064);
}

TEST(PaddingBound, NeverExceedsTheBestAssignment) {
  std::mt19937 random(3);
  int num_tight = 0;
  constexpr int kTries = 3000;
  for (int i = 0; i < kTries; ++i) {
    std::vector<BrickedTensor> tensors;
    std::vector<int64_t> pieces;
    const auto num_tensors = static_cast<int64_t>(1 + random() % 3);
    for (int64_t t = 0; t < num_tensors; ++t) {
      const auto brick = static_cast<int64_t>(1 + random() % 12);
      const auto numel = static_cast<int64_t>(brick + random() % (3 * static_cast<size_t>(brick)));
      tensors.push_back(bricked(t, numel, brick, 1));
      for (int64_t rest = numel; rest > 0; rest -= brick) pieces.push_back(std::min(brick, rest));
    }
    const size_t num_ranks = 1 + random() % 4;
    const int64_t bound = min_shard_numel(tensors, 1, static_cast<int64_t>(num_ranks));
    const int64_t best = shortest_shard(pieces, num_ranks);
    ASSERT_LE(bound, best) << list_text(pieces) << " on " << num_ranks;
    num_tight += bound == best;
  }
  EXPECT_GT(num_tight, kTries / 2) << "a bound that is rarely reached would flatter us";
}

}  // namespace
}  // namespace fsdp::padding_bound_test
