// Sums over ranks and micro-steps, in the order of each strategy, are those of one tree over lanes.
#include "fsdp/layout/lanes.h"

#include <gtest/gtest.h>

#include <cmath>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "fsdp/base/error.h"

namespace fsdp::lanes_test {
namespace {

// Level by level.
float tree_of(std::vector<float> values) {
  while (values.size() > 1) {
    std::vector<float> above;
    for (size_t i = 0; i + 1 < values.size(); i += 2) above.push_back(values[i] + values[i + 1]);
    values = above;
  }
  return values.front();
}

std::vector<Strategy> strategies() {
  std::vector<Strategy> all = {Strategy::no_shard, Strategy::optim, Strategy::optim_grads,
                               Strategy::optim_grads_params};
  // One's own: gradients that every backward reduces along both axes.
  all.push_back({.gradient = {Placement::kShard, Placement::kShard},
                 .optimizer = {Placement::kShard, Placement::kShard}});
  return all;
}

template <typename Body>
void each_axis_rank(int64_t size, const Body& body) {
  for (int64_t rank = 0; rank < size; ++rank) body(rank);
}

// One gradient as the engine adds it: an axis at a time in every backward, micro-steps by the
// counter, and the other axes once.
float added_by(const LaneOrder& order, const Strategy& strategy, MeshShape ranks,
               const std::vector<float>& lanes) {
  const auto over = [&](Placement placement, int64_t size, const auto& value_of) {
    std::vector<float> values;
    each_axis_rank(size, [&](int64_t rank) { values.push_back(value_of(rank)); });
    return placement == Placement::kShard ? tree_of(values) : std::nanf("");
  };
  // The sum over all micro-steps on the ranks at one place of the cycle-end axes.
  const auto of_cycle = [&](int64_t outer_at, int64_t inner_at) {
    const bool sums_inner = strategy.gradient.inner == Placement::kShard;
    const bool sums_outer = strategy.gradient.outer == Placement::kShard;
    std::vector<float> parts(static_cast<size_t>(MicroStepParts::count(order.micro_steps)));
    for (int64_t m = 0; m < order.micro_steps; ++m) {
      const auto inner_sum = [&](int64_t outer) {
        const auto lane = [&](int64_t inner) {
          return lanes[static_cast<size_t>(order.lane({outer, inner}, m))];
        };
        return sums_inner ? over(Placement::kShard, ranks.inner, lane) : lane(inner_at);
      };
      const float value =
          sums_outer ? over(Placement::kShard, ranks.outer, inner_sum) : inner_sum(outer_at);
      float& part = parts[static_cast<size_t>(MicroStepParts::part_of(m))];
      part = MicroStepParts::is_added(m) ? part + value : value;
      MicroStepParts::complete(m, [&](int64_t to, int64_t from) {
        parts[static_cast<size_t>(to)] += parts[static_cast<size_t>(from)];
      });
    }
    return parts.front();
  };
  std::vector<float> outer_values;
  for (int64_t outer = 0; outer < (strategy.gradient.outer == Placement::kShard ? 1 : ranks.outer);
       ++outer) {
    std::vector<float> inner_values;
    for (int64_t inner = 0;
         inner < (strategy.gradient.inner == Placement::kShard ? 1 : ranks.inner); ++inner)
      inner_values.push_back(of_cycle(outer, inner));
    outer_values.push_back(tree_of(inner_values));
  }
  return tree_of(outer_values);
}

TEST(LaneOrder, MakesOneSumOfAnyNumberOfRanks) {
  std::mt19937 random(7);
  std::normal_distribution<float> normal;
  for (int64_t lanes = 1; lanes <= 64; lanes *= 2) {
    std::vector<float> values(static_cast<size_t>(lanes));
    for (float& value : values) value = normal(random);
    const float expected = tree_of(values);
    for (const Strategy& strategy : strategies())
      for (int64_t outer = 1; outer <= lanes; outer *= 2)
        for (int64_t inner = 1; outer * inner <= lanes; inner *= 2) {
          const MeshShape ranks{.outer = outer, .inner = inner};
          const LaneOrder order = LaneOrder::of(lanes, strategy, ranks);
          EXPECT_EQ(added_by(order, strategy, ranks, values), expected)
              << lanes << " lanes on " << outer << " x " << inner << ", "
              << to_text(strategy.gradient);
        }
  }
}

TEST(LaneOrder, DealsEveryLaneOnce) {
  for (const Strategy& strategy : strategies())
    for (const MeshShape ranks : {MeshShape{1, 8}, MeshShape{4, 2}, MeshShape{2, 1}}) {
      const LaneOrder order = LaneOrder::of(32, strategy, ranks);
      std::set<int64_t> dealt;
      for (int64_t m = 0; m < order.micro_steps; ++m)
        for (int64_t outer = 0; outer < ranks.outer; ++outer)
          for (int64_t inner = 0; inner < ranks.inner; ++inner)
            dealt.insert(order.lane({outer, inner}, m));
      EXPECT_EQ(dealt.size(), 32U);
      EXPECT_EQ(*dealt.begin(), 0);
      EXPECT_EQ(*dealt.rbegin(), 31);
    }
}

TEST(LaneOrder, DealsAMicroStepsLanesToNeighboursWhereEveryBackwardReduces) {
  const LaneOrder order = LaneOrder::of(8, Strategy::optim_grads_params, {.inner = 2});
  EXPECT_EQ(order.micro_steps, 4);
  for (int64_t m = 0; m < 4; ++m)
    for (int64_t rank = 0; rank < 2; ++rank)
      EXPECT_EQ(order.lane({.inner = rank}, m), 2 * m + rank);
  // Here the ranks are added last.
  EXPECT_EQ(LaneOrder::of(8, Strategy::no_shard, {.inner = 2}).lane({.inner = 1}, 0), 4);
}

TEST(LaneOrder, RefusesNumbersThatMakeNoTree) {
  const auto words = [](int64_t lanes, MeshShape ranks) -> std::string {
    try {
      LaneOrder::of(lanes, Strategy::optim_grads, ranks);
    } catch (const UsageError& error) {
      return error.what();
    }
    return "";
  };
  EXPECT_EQ(words(6, {.inner = 2}), "lanes is 6; it must be a power of two");
  EXPECT_EQ(words(0, {}), "lanes is 0; it must be a power of two");
  EXPECT_EQ(
      words(4, {.outer = 2, .inner = 4}),
      "lanes is 4 for 8 ranks that compute a batch each; their number must be a power of two, "
      "and at most that of the lanes");
  EXPECT_EQ(
      words(4, {.inner = 3}),
      "lanes is 4 for 3 ranks that compute a batch each; their number must be a power of two, "
      "and at most that of the lanes");
  EXPECT_EQ(words(4, {.inner = 4}), "");
}

TEST(MicroStepParts, AreFew) {
  EXPECT_EQ(MicroStepParts::count(1), 1);
  EXPECT_EQ(MicroStepParts::count(2), 1);
  EXPECT_EQ(MicroStepParts::count(4), 2);
  EXPECT_EQ(MicroStepParts::count(8), 3);
  EXPECT_EQ(MicroStepParts::count(1024), 10);
  for (int64_t micro_steps = 1; micro_steps <= 64; micro_steps *= 2)
    for (int64_t m = 0; m < micro_steps; ++m)
      EXPECT_LT(MicroStepParts::part_of(m), MicroStepParts::count(micro_steps)) << m;
}

}  // namespace
}  // namespace fsdp::lanes_test
