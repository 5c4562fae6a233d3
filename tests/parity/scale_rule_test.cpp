// The divisor of a gradient: the rule alone, and the gradient that the optimizer sees.
#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <tuple>
#include <vector>

#include "fsdp/base/text.h"
#include "fsdp/comm/world.h"
#include "fsdp/shard/fully_shard.h"
#include "fsdp/shard/group/redistribution.h"
#include "support/chain_model.h"
#include "support/run_ranks.h"

namespace fsdp::scale_rule_test {

namespace {

using testing::Chain;
using testing::run_ranks;

constexpr const char* kStrategies[] = {"no_shard",
                                       "optim",
                                       "optim_grads",
                                       "optim_grads_params",
                                       "optim+hfsdp",
                                       "optim_grads+hfsdp",
                                       "optim_grads_params+hfsdp",
                                       "RS/PP/RS",
                                       "RS/PP/SS",
                                       "RR/SS/SS",
                                       "SS/SS/SS"};

// "inner S to R, x 1": one stage in words.
std::vector<std::string> words_of(const PlacementPath& path) {
  std::vector<std::string> words;
  for (const PlacementStage& stage : path)
    words.push_back(concat(stage.axis == Axis::kInner ? "inner " : "outer ",
                           letter_of(stage.from()), letter_of(stage.to()),
                           stage.scale == 1.0 ? "" : concat(" / ", 1.0 / stage.scale)));
  return words;
}

TEST(GroupPaths, HaveTheStagesThatThePlacementsAskFor) {
  using Words = std::vector<std::string>;
  struct Row {
    const char* strategy;
    Words refresh, unshard, each_backward, cycle_end;
  };
  const std::vector<Row> rows = {
      {"no_shard", {}, {}, {}, {"inner PR / 6", "outer PR"}},
      {"optim", {"inner SR"}, {}, {}, {"inner PS / 6", "outer PR"}},
      {"optim_grads", {"inner SR"}, {}, {"inner PS / 6"}, {"outer PR"}},
      {"optim_grads_params", {}, {"inner SR"}, {"inner PS / 6"}, {"outer PR"}},
      {"optim+hfsdp", {"outer SR", "inner SR"}, {}, {}, {"inner PS / 6", "outer PS"}},
      {"optim_grads+hfsdp", {"outer SR", "inner SR"}, {}, {"inner PS / 6"}, {"outer PS"}},
      {"optim_grads_params+hfsdp", {"outer SR"}, {"inner SR"}, {"inner PS / 6"}, {"outer PS"}},
      {"RS/PP/RS", {}, {"inner SR"}, {}, {"inner PS / 6", "outer PR"}},
      {"RS/PP/SS", {"outer SR"}, {"inner SR"}, {}, {"inner PS / 6", "outer PS"}},
      {"RR/SS/SS", {"outer SR", "inner SR"}, {}, {"inner PS / 6", "outer PS"}, {}},
      {"SS/SS/SS", {}, {"outer SR", "inner SR"}, {"inner PS / 6", "outer PS"}, {}},
  };
  for (const Row& row : rows) {
    SCOPED_TRACE(row.strategy);
    const GroupPaths paths = group_paths(parse_strategy(row.strategy), {.outer = 2, .inner = 3},
                                         GradientOf::kMeanOverRanks, 6);
    EXPECT_EQ(words_of(paths.refresh), row.refresh);
    EXPECT_EQ(words_of(paths.unshard), row.unshard);
    EXPECT_EQ(words_of(paths.each_backward), row.each_backward);
    EXPECT_EQ(words_of(paths.cycle_end), row.cycle_end);
  }
}

// Each stage begins with the placements after the one before.
TEST(GroupPaths, StagesContinueEachOther) {
  const GroupPaths paths =
      group_paths(Strategy::optim.hfsdp(), {.outer = 2, .inner = 3}, GradientOf::kMeanOverRanks, 6);
  for (const PlacementPath& path : {paths.refresh, paths.cycle_end}) {
    ASSERT_EQ(path.size(), 2u);
    EXPECT_EQ(path[0].after, path[1].before);
  }
  EXPECT_EQ(to_text(paths.refresh.front().before), "SS");
  EXPECT_EQ(to_text(paths.refresh.back().after), "RR");
  EXPECT_EQ(to_text(paths.cycle_end.front().before), "PP");
  EXPECT_EQ(to_text(paths.cycle_end.back().after), "SS");
}

// Every cell of strategy x outer x inner x kind of parameters x loss. Ranks of an ep group have
// losses of their own, those of a tp group have one, and an equal gradient each.
TEST(GroupPaths, DivideGradientsOnceByAllLosses) {
  struct Kind {
    const char* name;
    int64_t owners;  // ranks of one place of outer x inner
    int64_t tp;
    int64_t num_copies;
  };
  const std::vector<Kind> kinds = {
      {"dense", 1, 1, 1},        {"expert, ep 2", 2, 1, 1},       {"expert, ep 3", 3, 1, 1},
      {"tensor, tp 2", 2, 2, 1}, {"partial, tp 2", 1, 2, 1},      {"equal, tp 2", 1, 2, 2},
      {"equal, tp 4", 1, 4, 4},  {"expert, ep 4, tp 2", 4, 2, 1},
  };
  for (const char* strategy : kStrategies)
    for (const Kind& kind : kinds)
      for (int64_t cell = 0; cell < 16; ++cell)
        for (const GradientOf gradient : {GradientOf::kMeanOverRanks, GradientOf::kSumOverRanks}) {
          const int64_t outer = 1 + cell % 4, inner = 1 + cell / 4 % 4;
          SCOPED_TRACE(concat(strategy, " ", outer, "x", inner, ", ", kind.name));
          const int64_t data_parallel_size = outer * inner * kind.owners / kind.tp;
          if (data_parallel_size * kind.tp != outer * inner * kind.owners)
            continue;  // not such a grid
          const GroupPaths paths =
              group_paths(parse_strategy(strategy), {.outer = outer, .inner = inner}, gradient,
                          data_parallel_size, kind.num_copies);
          const bool is_mean = gradient == GradientOf::kMeanOverRanks;
          const double scale =
              1.0 / static_cast<double>((is_mean ? data_parallel_size : 1) * kind.num_copies);
          PlacementPath path = paths.each_backward;
          path.insert(path.end(), paths.cycle_end.begin(), paths.cycle_end.end());
          // One stage per axis of several ranks: a group of one has nothing to reduce or to scale.
          EXPECT_EQ(path.size(), static_cast<size_t>((outer > 1) + (inner > 1)));
          for (const PlacementStage& stage : path) {
            EXPECT_GT(stage.axis == Axis::kInner ? inner : outer, 1);
            EXPECT_EQ(stage.scale, &stage == &path.front() ? scale : 1.0);
          }
          EXPECT_EQ(paths.local_scale, path.empty() ? scale : 1.0);
        }
}

// --- end to end ----------------------------------------------------------------------------------

// Whole numbers, different for every rank and microbatch.
double factor_of(int rank, int microbatch) { return 3.0 * rank + 5.0 * microbatch + 1.0; }

double expected_gradient(int ranks, int microbatches, GradientOf gradient) {
  double sum = 0.0;
  for (int rank = 0; rank < ranks; ++rank)
    for (int i = 0; i < microbatches; ++i) sum += factor_of(rank, i);
  return gradient == GradientOf::kMeanOverRanks ? sum / ranks : sum;
}

class ScaleRule
    : public ::testing::TestWithParam<std::tuple<const char*, std::pair<int, int>, int>> {};

TEST_P(ScaleRule, HoldsForKnownGradients) {
  const auto& [strategy, mesh_shape, microbatches] = GetParam();
  const auto [outer, inner] = mesh_shape;
  for (const GradientOf gradient : {GradientOf::kMeanOverRanks, GradientOf::kSumOverRanks}) {
    const double expected = expected_gradient(outer * inner, microbatches, gradient);
    // The sums are whole numbers and exact; a division by 3 is one rounding of the factor, one of
    // the product and, where microbatches are divided one by one, one more for each sum.
    const double tolerance =
        gradient == GradientOf::kMeanOverRanks ? (2 + microbatches) * 0x1p-24 * expected : 0.0;
    run_ranks(outer * inner, [&, strategy = strategy, outer = outer,
                              microbatches = microbatches](World& world) {
      const Mesh mesh = world.mesh({.outer = outer});
      Chain chain(std::vector<int64_t>{37, 5});
      const Sharded sharded =
          fully_shard(chain, mesh, {.strategy = parse_strategy(strategy), .gradient = gradient});
      for (int cycle = 0; cycle < 2; ++cycle) {
        for (int i = 0; i < microbatches; ++i) {
          sharded.microbatch({.last = i + 1 == microbatches});
          chain(factor_of(world.rank(), i)).backward();
        }
        for (const ShardedParameter& parameter : sharded.parameters()) {
          const at::Tensor error = (parameter.gradient.to(at::kDouble) - expected).abs();
          EXPECT_TRUE(error.le(tolerance).all().item<bool>())
              << parameter.name << " is " << parameter.gradient << ", expected " << expected;
        }
        sharded.zero_grad();
      }
    });
  }
}

std::string cell_name(const ::testing::TestParamInfo<ScaleRule::ParamType>& cell) {
  const auto& [strategy, mesh, microbatches] = cell.param;
  std::string name = concat(strategy, "_", mesh.first, "x", mesh.second, "_mb", microbatches);
  std::replace_if(
      name.begin(), name.end(), [](char c) { return c == '+' || c == '/'; }, '_');
  return name;
}

INSTANTIATE_TEST_SUITE_P(Cells, ScaleRule,
                         ::testing::Combine(::testing::ValuesIn(kStrategies),
                                            ::testing::Values(std::pair(1, 1), std::pair(1, 2),
                                                              std::pair(1, 3), std::pair(1, 4),
                                                              std::pair(2, 1), std::pair(2, 2),
                                                              std::pair(3, 1), std::pair(2, 3)),
                                            ::testing::Values(1, 3)),
                         cell_name);

// --- wide sums -----------------------------------------------------------------------------------

// A running sum in bf16 (8 bits) would be off by up to 2^-8 of itself with each of 64 additions. In
// fp32 the sum of 64 such numbers is exact, so that only the rounding of the result remains.
constexpr int kManyRanks = 64;

double narrow_factor(int rank) {
  return at::full({}, 1.0 + 0.37 * rank / kManyRanks).to(at::kBFloat16).item<double>();
}

TEST(WideSums, SixtyFourBf16GradientsAreRoundedOnce) {
  double sum = 0.0;
  for (int rank = 0; rank < kManyRanks; ++rank) sum += narrow_factor(rank);
  struct Case {
    const char* strategy;
    at::ScalarType main_grads;
    at::ScalarType result;  // the type of the result
  };
  for (const Case& each :
       {Case{"optim_grads_params", at::kFloat, at::kFloat},
        Case{"optim_grads_params", at::kBFloat16, at::kBFloat16},
        Case{"optim", at::kFloat, at::kFloat}, Case{"optim", at::kBFloat16, at::kBFloat16},
        // The result of an all-reduce travels, too.
        Case{"no_shard", at::kFloat, at::kBFloat16}}) {
    const double expected = at::full({}, sum, at::kDouble).to(each.result).item<double>();
    run_ranks(kManyRanks, [&](World& world) {
      const Mesh mesh = world.mesh();
      Chain chain(std::vector<int64_t>{kManyRanks * 3});
      chain->to(at::kBFloat16);
      const Sharded sharded =
          fully_shard(chain, mesh,
                      {.strategy = parse_strategy(each.strategy),
                       .precision = {.main_grads = each.main_grads, .grad_comm = at::kBFloat16},
                       .gradient = GradientOf::kSumOverRanks});
      chain(narrow_factor(world.rank())).backward();
      for (const ShardedParameter& parameter : sharded.parameters())
        EXPECT_TRUE(parameter.gradient.eq(expected).all().item<bool>())
            << each.strategy << " in " << each.main_grads << ": " << parameter.gradient
            << ", expected " << expected;
    });
  }
}

}  // namespace
}  // namespace fsdp::scale_rule_test
