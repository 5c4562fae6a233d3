// The cost of collectives on clusters that no test has.
#include "fsdp/comm/collective_cost.h"

#include <gtest/gtest.h>

namespace fsdp::collective_cost_test {
namespace {

constexpr SumOrder kCluster{.ranks = 1024, .group = 8};
constexpr SumOrder kHost{.ranks = 8, .group = 8};
constexpr int64_t kBytes = int64_t{1024} * 128 * 24;

TEST(CollectiveCost, CarriesOneSumOfAHostThroughItsCards) {
  for (const Collective collective : {Collective::kReduceScatter, Collective::kAllReduce}) {
    const CollectiveCost fp32 = cost_of(collective, {kBytes, 4, 4}, kCluster);
    EXPECT_LE(fp32.far_bytes, fp32.ring_far_bytes);
    const CollectiveCost bf16 = cost_of(collective, {kBytes, 2, 4}, kCluster);
    EXPECT_LE(bf16.far_bytes, 2 * bf16.ring_far_bytes);
  }
  // In rank order every contribution of a host would pass.
  const CollectiveCost flat =
      cost_of(Collective::kReduceScatter, {kBytes, 4, 4}, {.ranks = 1024, .group = 1});
  EXPECT_EQ(flat.far_bytes, kBytes / 1024 * 1023);
}

TEST(CollectiveCost, MovesNoMoreOnOneHostThanEveryContributionOnce) {
  const CollectiveCost cost = cost_of(Collective::kReduceScatter, {kBytes, 2, 4}, kHost);
  EXPECT_EQ(cost.near_bytes, kBytes / 8 * 7);
  EXPECT_EQ(cost.far_bytes, 0);
  EXPECT_EQ(cost.ring_far_bytes, 0);
}

// A gather receives all of it, from inside the host and from others.
TEST(CollectiveCost, GathersAsARing) {
  for (const SumOrder& order : {kCluster, kHost, SumOrder{.ranks = 6, .group = 1}}) {
    const CollectiveCost cost = cost_of(Collective::kAllGather, {kBytes, 1, 4}, order);
    EXPECT_EQ(cost.near_bytes + cost.far_bytes, kBytes / order.ranks * (order.ranks - 1));
    EXPECT_EQ(cost.far_bytes, cost.ring_far_bytes);
    EXPECT_EQ(cost.launches, 1);
  }
}

TEST(CollectiveCost, LaunchesAsOftenOnAnyNumberOfHosts) {
  for (const int ranks : {16, 64, 512, 4096}) {
    const SumOrder order{.ranks = ranks, .group = 8};
    EXPECT_EQ(cost_of(Collective::kReduceScatter, {kBytes * 4, 2, 4}, order).launches, 4) << ranks;
    EXPECT_EQ(cost_of(Collective::kAllReduce, {kBytes * 4, 2, 4}, order).launches, 5) << ranks;
    EXPECT_EQ(cost_of(Collective::kAllReduce, {8, 8, 8}, order).launches, 2) << "a norm";
  }
  EXPECT_EQ(cost_of(Collective::kReduceScatter, {kBytes, 2, 4}, kHost).launches, 2);
  // An owner of whole matrices may have four times the mean: 64 MiB hold less than its share.
  const int64_t numel = int64_t{8} << 20;
  const CollectiveCost even = cost_of(Collective::kReduceScatter, {2 * numel, 2, 4}, kHost);
  const CollectiveCost uneven =
      cost_of(Collective::kReduceScatter, {2 * numel, 2, 4, numel / 2}, kHost);
  EXPECT_EQ(even.staging_bytes, 7 * 2 * numel / 8);
  EXPECT_EQ(uneven.staging_bytes, 7 * 2 * numel / 2);
  EXPECT_EQ(even.near_bytes, uneven.near_bytes);
  EXPECT_EQ(cost_of(Collective::kReduceScatter, {kBytes, 2, 4}, {}), CollectiveCost());
}

}  // namespace
}  // namespace fsdp::collective_cost_test
