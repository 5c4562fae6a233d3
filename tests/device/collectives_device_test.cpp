// How many collectives a step has, counted in the device's trace: as many, and as many bytes, as
// the plan says.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cstdio>
#include <numeric>
#include <set>
#include <string>
#include <tuple>
#include <vector>

#include "fsdp/base/text.h"
#include "fsdp/plan/forecast.h"
#include "fsdp/plan/model_tensors.h"
#include "fsdp/plan/pool_forecast.h"
#include "support/device_trace.h"
#include "support/llama_training.h"
#include "support/require.h"
#include "support/run_ranks.h"

namespace fsdp::collectives_device_test {
namespace {

using testing::DeviceSpan;
using testing::DeviceTrace;
using testing::LlamaTraining;

constexpr int kRanks = 2;
constexpr int kSteps = 2;

LlamaConfig narrow_llama() {
  LlamaConfig config = testing::wide_llama();
  config.vocab_size = 1000;
  config.hidden_size = 256;
  config.num_attention_heads = 4;
  config.intermediate_size = 400;
  return config;
}

// The collectives of one rank in one step.
struct Planned {
  int64_t gathers = 0;
  int64_t reductions = 0;
  int64_t gathered_bytes = 0;  // received
};

Planned planned(const Strategy& strategy, int32_t prefetch, int microbatches) {
  PlanOptions options{.ranks = kRanks,
                      .strategy = strategy,
                      .precision = {.main_grads = DType::kFloat32},
                      .pool = PoolKind::kMaxPool,
                      .prefetch = prefetch};
  const ModelShape model = build_model("narrow", ModelConfig(narrow_llama()));
  const std::vector<GroupPlan> groups = lay_out(model, options);
  EXPECT_EQ(groups.size(), model.units.size()) << "units of one type have one group";
  const PoolForecast pool = forecast_pool(model, groups, options);
  const auto num_units = static_cast<int64_t>(model.units.size());
  const bool shards_weights = strategy.parameter.inner == Placement::kShard;
  const bool refreshes = !shards_weights && strategy.optimizer.inner == Placement::kShard;
  const bool reduces_each = strategy.gradient.inner == Placement::kShard;
  Planned result;
  // Sharded weights are gathered in every forward and backward, others once, after the update.
  result.gathers = refreshes ? num_units
                             : microbatches * std::accumulate(pool.num_gathers.begin(),
                                                              pool.num_gathers.end(), int64_t{0});
  result.reductions = (reduces_each ? microbatches : 1) * num_units;
  result.gathered_bytes = Planner(model, options).forecast(strategy).traffic.sum().all_gather *
                          (refreshes ? 1 : microbatches);
  return result;
}

using Case = std::tuple<std::string, int, int>;  // strategy, prefetch, microbatches
class CollectivesOfAStep : public ::testing::TestWithParam<Case> {};

TEST_P(CollectivesOfAStep, AreAsManyAsPlanned) {
  FSDP_REQUIRE_GPU();
  const Strategy strategy = parse_strategy(std::get<0>(GetParam()));
  const int prefetch = std::get<1>(GetParam());
  const int microbatches = std::get<2>(GetParam());
  DeviceTrace trace;
  testing::run_ranks(kRanks, [&](World& world) {
    LlamaTraining training(world, {.strategy = strategy, .prefetch = prefetch},
                           {.config = narrow_llama(), .microbatches = microbatches});
    training.steps(3);
    DeviceTrace mine = testing::trace_device(world, [&] { training.steps(kSteps); });
    if (world.rank() == 0) trace = std::move(mine);
  });
  const auto is_sum = [](const DeviceSpan& span) { return span.is_named("sum_kernel"); };
  const std::set<int64_t> compute = trace.streams_of(testing::is_computing);
  const std::set<int64_t> reduce = trace.streams_of(is_sum);
  const auto is_gathering = [&](const DeviceSpan& span) {
    return testing::is_device_copy(span) && !compute.contains(span.stream) &&
           !reduce.contains(span.stream);
  };
  const Planned plan = planned(strategy, prefetch, microbatches);
  // A gather copies from each rank; a rank's own part is in place if weights stay whole.
  const bool in_place = strategy.parameter.inner == Placement::kReplicate;
  const int64_t copies = in_place ? kRanks - 1 : kRanks;
  const int64_t times = kSteps * kRanks;
  EXPECT_EQ(trace.count(is_gathering), times * plan.gathers * copies);
  EXPECT_EQ(trace.bytes(is_gathering) * (kRanks - 1), times * plan.gathered_bytes * copies);
  // And one a step of which gradients came (gradients.h), for all ranks at once.
  EXPECT_EQ(trace.count(is_sum), times * plan.reductions + kSteps);
  if (HasFailure()) std::printf("%s", trace.text().c_str());
}

std::string name_of_case(const ::testing::TestParamInfo<Case>& info) {
  const auto& [strategy, prefetch, microbatches] = info.param;
  return concat(strategy, "_prefetch", prefetch, "_microbatches", microbatches);
}

INSTANTIATE_TEST_SUITE_P(Strategies, CollectivesOfAStep,
                         ::testing::Combine(::testing::Values("no_shard", "optim", "optim_grads",
                                                              "optim_grads_params"),
                                            ::testing::Values(1), ::testing::Values(1, 3)),
                         name_of_case);
INSTANTIATE_TEST_SUITE_P(Prefetch, CollectivesOfAStep,
                         ::testing::Combine(::testing::Values("optim_grads_params"),
                                            ::testing::Values(0, 2, 3), ::testing::Values(1)),
                         name_of_case);

}  // namespace
}  // namespace fsdp::collectives_device_test
