// Which collectives a training step and an optimizer's step need: counted, in a world that records
// instead of communicating.
#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "fsdp/base/text.h"
#include "fsdp/comm/collective_cost.h"
#include "fsdp/comm/communicator.h"
#include "fsdp/comm/world.h"
#include "fsdp/optim/adamw.h"
#include "fsdp/plan/forecast.h"
#include "fsdp/shard/fully_shard.h"
#include "support/chain_model.h"

namespace fsdp::collectives_test {
namespace {

using testing::Chain;

constexpr int kUnits = 5;
const std::vector<int64_t> kNumels(kUnits, 1000);

// Calls of one step by kind and axis.
struct Counts {
  int64_t inner_gathers = 0;
  int64_t outer_gathers = 0;
  int64_t inner_scatters = 0;
  int64_t outer_scatters = 0;
  int64_t inner_all_reduces = 0;
  int64_t outer_all_reduces = 0;

  friend bool operator==(const Counts&, const Counts&) = default;
};

void PrintTo(const Counts& counts, std::ostream* out) {
  *out << "gathers " << counts.inner_gathers << " inner, " << counts.outer_gathers
       << " outer; reduce-scatters " << counts.inner_scatters << ", " << counts.outer_scatters
       << "; all-reduces " << counts.inner_all_reduces << ", " << counts.outer_all_reduces;
}

bool is_outer(const RecordedCall& call) { return call.communicator.find("outer") == 0; }

Counts count(const Recording& calls) {
  Counts counts;
  for (const RecordedCall& call : calls) {
    const bool outer = is_outer(call);
    switch (call.print.kind) {
      case OpKind::kAllGather:
        ++(outer ? counts.outer_gathers : counts.inner_gathers);
        break;
      case OpKind::kReduceScatter:
        ++(outer ? counts.outer_scatters : counts.inner_scatters);
        break;
      case OpKind::kAllReduce:
        ++(outer ? counts.outer_all_reduces : counts.inner_all_reduces);
        break;
      case OpKind::kAllToAll:
      case OpKind::kBroadcast:
      case OpKind::kCopy:
      case OpKind::kBarrier:
        ADD_FAILURE() << call.print.text() << " has no place in a step";
    }
  }
  return counts;
}

// The bytes that this rank receives, in the forecast's terms.
Traffic traffic_of(const Recording& calls) {
  Traffic sum;
  for (const RecordedCall& call : calls) {
    const int64_t received = call.print.bytes - call.print.bytes / call.ranks;
    Traffic one;
    AxisTraffic& axis = is_outer(call) ? one.outer : one.inner;
    if (call.print.kind == OpKind::kAllGather) axis.all_gather = received;
    if (call.print.kind == OpKind::kReduceScatter) axis.reduce_scatter = received;
    if (call.print.kind == OpKind::kAllReduce) axis.all_reduce = 2 * received;
    sum += one;
  }
  return sum;
}

// Nothing moves in a simulated world, so values mean nothing: only calls do.
Recording record_step(const ShardOptions& options, MeshShape shape, int microbatches,
                      const CommOptions& comm = {}) {
  const auto recording = std::make_shared<Recording>();
  World world = World::simulated(0, static_cast<int>(shape.outer * shape.inner), recording, comm);
  const Mesh mesh = world.mesh({.outer = static_cast<int>(shape.outer)});
  Chain chain(kNumels);
  const Sharded sharded = fully_shard(chain, mesh, options);
  constexpr int kSteps = 3;  // the order is known from the second on
  for (int step = 0; step < kSteps; ++step) {
    recording->clear();
    for (int i = 0; i < microbatches; ++i) {
      sharded.microbatch({.last = i + 1 == microbatches});
      chain(0.0).backward();
    }
    sharded.wait_gradients();
    sharded.refresh_weights();
    sharded.zero_grad();
  }
  return *recording;
}

struct Expected {
  const char* strategy;
  MeshShape mesh;
  // In a step of m microbatches: fixed + m * each.
  Counts once;
  Counts each;
};

class Collectives : public ::testing::TestWithParam<Expected> {};

TEST_P(Collectives, AreAsManyAsTheStrategyNeeds) {
  const Expected& expected = GetParam();
  const ShardOptions options{.strategy = parse_strategy(expected.strategy)};
  for (const int microbatches : {1, 3}) {
    SCOPED_TRACE(microbatches);
    const auto total = [&](int64_t Counts::*what) {
      return expected.once.*what + microbatches * (expected.each.*what);
    };
    const Counts wanted{total(&Counts::inner_gathers),     total(&Counts::outer_gathers),
                        total(&Counts::inner_scatters),    total(&Counts::outer_scatters),
                        total(&Counts::inner_all_reduces), total(&Counts::outer_all_reduces)};
    EXPECT_EQ(count(record_step(options, expected.mesh, microbatches)), wanted);
  }
}

constexpr int64_t kU = kUnits;
// Forward and backward; the last unit of the forward is still whole when the backward begins.
constexpr int64_t kBothPasses = 2 * kU - 1;

std::string row_name(const ::testing::TestParamInfo<Expected>& row) {
  std::string name =
      concat(row.param.strategy, "_", row.param.mesh.outer, "x", row.param.mesh.inner);
  std::replace_if(
      name.begin(), name.end(), [](char c) { return c == '+' || c == '/'; }, '_');
  return name;
}

INSTANTIATE_TEST_SUITE_P(
    Strategies, Collectives,
    ::testing::Values(
        Expected{"no_shard", {1, 4}, {.inner_all_reduces = kU}, {}},
        Expected{"no_shard", {2, 2}, {.inner_all_reduces = kU, .outer_all_reduces = kU}, {}},
        Expected{"optim", {1, 4}, {.inner_gathers = kU, .inner_scatters = kU}, {}},
        Expected{"optim",
                 {2, 2},
                 {.inner_gathers = kU, .inner_scatters = kU, .outer_all_reduces = kU},
                 {}},
        Expected{"optim_grads", {1, 4}, {.inner_gathers = kU}, {.inner_scatters = kU}},
        Expected{"optim_grads",
                 {2, 2},
                 {.inner_gathers = kU, .outer_all_reduces = kU},
                 {.inner_scatters = kU}},
        Expected{
            "optim_grads_params", {1, 4}, {}, {.inner_gathers = kBothPasses, .inner_scatters = kU}},
        Expected{"optim_grads_params",
                 {2, 2},
                 {.outer_all_reduces = kU},
                 {.inner_gathers = kBothPasses, .inner_scatters = kU}},
        Expected{
            "optim+hfsdp",
            {2, 2},
            {.inner_gathers = kU, .outer_gathers = kU, .inner_scatters = kU, .outer_scatters = kU},
            {}},
        Expected{"optim_grads+hfsdp",
                 {2, 2},
                 {.inner_gathers = kU, .outer_gathers = kU, .outer_scatters = kU},
                 {.inner_scatters = kU}},
        Expected{"optim_grads_params+hfsdp",
                 {2, 2},
                 {.outer_gathers = kU, .outer_scatters = kU},
                 {.inner_gathers = kBothPasses, .inner_scatters = kU}},
        // HSDP and HFSDP over inner groups of one rank: only the outer axis is left.
        Expected{"optim_grads_params", {3, 1}, {.outer_all_reduces = kU}, {}},
        Expected{
            "optim_grads_params+hfsdp", {3, 1}, {.outer_gathers = kU, .outer_scatters = kU}, {}},
        Expected{"SS/SS/SS",
                 {2, 2},
                 {},
                 {.inner_gathers = kBothPasses,
                  .outer_gathers = kBothPasses,
                  .inner_scatters = kU,
                  .outer_scatters = kU}},
        Expected{"optim_grads_params+hfsdp", {1, 1}, {}, {}}),
    row_name);

ModelShape chain_shape() {
  ModelShape shape{.name = "chain", .units = {}, .uses = {}};
  for (int i = 0; i < kUnits; ++i) {
    const std::string name = concat("link", i);
    shape.units.push_back({name, {{concat(name, ".weight"), {kNumels[0]}, std::nullopt}}});
    shape.uses.push_back(i);
  }
  return shape;
}

TEST(Collectives, MoveTheBytesThatThePlanForecasts) {
  for (const Strategy& strategy : named_strategies())
    for (const MeshShape mesh : {MeshShape{1, 4}, MeshShape{2, 2}, MeshShape{3, 1}})
      for (const auto wire : {at::kFloat, at::kBFloat16}) {
        // The plan refuses to shard an axis of one rank.
        if (strategy.optimizer.outer == Placement::kShard && mesh.outer == 1) continue;
        SCOPED_TRACE(
            concat(to_text(strategy), " ", mesh.outer, "x", mesh.inner, " ", c10::toString(wire)));
        ShardOptions options{.strategy = strategy};
        options.precision.grad_comm = wire;
        PlanOptions plan{.ranks = mesh.outer * mesh.inner,
                         .outer = mesh.outer,
                         .compute = DType::kFloat32,
                         .precision = options.precision.types(),
                         .pool = options.pool};
        const Traffic expected = Planner(chain_shape(), plan).forecast(strategy).traffic;
        const Traffic actual = traffic_of(record_step(options, mesh, 1));
        EXPECT_EQ(actual.inner.all_gather, expected.inner.all_gather);
        EXPECT_EQ(actual.inner.reduce_scatter, expected.inner.reduce_scatter);
        EXPECT_EQ(actual.inner.all_reduce, expected.inner.all_reduce);
        EXPECT_EQ(actual.outer.all_gather, expected.outer.all_gather);
        EXPECT_EQ(actual.outer.reduce_scatter, expected.outer.reduce_scatter);
        EXPECT_EQ(actual.outer.all_reduce, expected.outer.all_reduce);
      }
}

// The cost of recorded calls, each with the size and the order of sums of its communicator.
NetworkForecast::Part cost_of_calls(const Recording& calls, bool gathers) {
  NetworkForecast::Part sum;
  for (const RecordedCall& call : calls) {
    if ((call.print.kind == OpKind::kAllGather) != gathers) continue;
    const Collective collective = gathers ? Collective::kAllGather
                                  : call.print.kind == OpKind::kReduceScatter
                                      ? Collective::kReduceScatter
                                      : Collective::kAllReduce;
    const CollectiveCost cost =
        cost_of(collective,
                {.bytes = call.print.bytes,
                 .element_bytes = static_cast<int64_t>(c10::elementSize(call.print.wire))},
                {.ranks = call.ranks, .group = call.sum_group});
    sum.near_bytes += cost.near_bytes;
    sum.far_bytes += cost.far_bytes;
    sum.ring_far_bytes += cost.ring_far_bytes;
    sum.launches += cost.launches;
  }
  return sum;
}

TEST(Collectives, CostTheNetworkWhatThePlanForecasts) {
  const struct {
    MeshShape mesh;
    int host_ranks;
  } clusters[] = {{{1, 8}, 2}, {{1, 8}, 4}, {{1, 8}, 8}, {{2, 4}, 2}, {{2, 4}, 4}, {{4, 2}, 4}};
  for (const auto& [mesh, host_ranks] : clusters)
    for (const Strategy& strategy : named_strategies()) {
      SCOPED_TRACE(
          concat(to_text(strategy), " ", mesh.outer, "x", mesh.inner, " on hosts of ", host_ranks));
      ShardOptions options{.strategy = strategy};
      if (strategy.optimizer.outer == Placement::kShard && mesh.outer == 1) continue;
      options.precision.grad_comm = at::kBFloat16;
      const PlanOptions plan{.ranks = 8,
                             .outer = mesh.outer,
                             .compute = DType::kFloat32,
                             .precision = options.precision.types(),
                             .pool = options.pool,
                             .host_ranks = host_ranks};
      const auto network = Planner(chain_shape(), plan).forecast(strategy).network;
      ASSERT_TRUE(network);
      const Recording calls = record_step(options, mesh, 1, {.sum_group = host_ranks});
      EXPECT_EQ(network->collectives, std::ssize(calls));
      for (const bool gathers : {false, true}) {
        const NetworkForecast::Part& expected = gathers ? network->gathers : network->reductions;
        const NetworkForecast::Part actual = cost_of_calls(calls, gathers);
        EXPECT_EQ(actual.near_bytes, expected.near_bytes) << gathers;
        EXPECT_EQ(actual.far_bytes, expected.far_bytes) << gathers;
        EXPECT_EQ(actual.ring_far_bytes, expected.ring_far_bytes) << gathers;
        EXPECT_EQ(actual.launches, expected.launches) << gathers;
      }
    }
}

TEST(Collectives, CarryTheWireTypeAndDivideOnce) {
  for (const Strategy& strategy : named_strategies()) {
    SCOPED_TRACE(to_text(strategy));
    ShardOptions options{.strategy = strategy};
    options.precision.grad_comm = at::kBFloat16;
    for (const RecordedCall& call : record_step(options, {2, 2}, 3)) {
      if (call.print.kind == OpKind::kAllGather) {
        EXPECT_EQ(call.print.wire, at::kFloat);
        continue;
      }
      EXPECT_EQ(call.print.wire, at::kBFloat16) << call.print.text();
      EXPECT_EQ(call.print.reduce, ReduceOp::kSum) << call.print.text();
      EXPECT_EQ(call.print.scale, is_outer(call) ? 1.0 : 0.25) << call.print.text();
    }
  }
}

// --- the optimizer's step -----------------------------------------------------------------------

// The collectives of step() itself, after two microbatches. Every parameter is in a unit, because
// one outside any would be gathered before step() returns, too.
Recording record_update(const ShardOptions& options, MeshShape shape, const StepOptions& step) {
  const auto recording = std::make_shared<Recording>();
  World world = World::simulated(0, static_cast<int>(shape.outer * shape.inner), recording);
  const Mesh mesh = world.mesh({.outer = static_cast<int>(shape.outer)});
  Chain chain(kNumels);
  const Sharded sharded = fully_shard(chain, mesh, options);
  AdamW optimizer(sharded, {.step = step});
  Recording update;
  for (int i = 0; i < 2; ++i) {  // the order is known from the second step on
    for (const bool last : {false, true}) {
      sharded.microbatch({.last = last});
      chain(0.0).backward();
    }
    sharded.wait_gradients();
    recording->clear();
    optimizer.step();
    optimizer.wait();
    update = *recording;
    optimizer.zero_grad();
  }
  return update;
}

// Which parameters got a gradient (engine/gradients.h).
bool tells_what_came(const RecordedCall& call) {
  return call.print.tag.text() == "missing gradients";
}

struct NormAxes {
  const char* strategy;
  MeshShape mesh;
  std::vector<std::string> axes;  // along which the optimizer's state is cut
};

const std::vector<NormAxes> kNormAxes = {
    {"no_shard", {1, 4}, {}},
    {"no_shard", {2, 2}, {}},
    {"optim", {1, 4}, {"inner"}},
    {"optim_grads", {1, 4}, {"inner"}},
    {"optim_grads_params", {1, 4}, {"inner"}},
    {"optim", {2, 2}, {"inner"}},
    {"optim_grads", {2, 2}, {"inner"}},
    {"optim_grads_params", {2, 2}, {"inner"}},
    {"optim+hfsdp", {2, 2}, {"inner", "outer"}},
    {"optim_grads+hfsdp", {2, 2}, {"inner", "outer"}},
    {"optim_grads_params+hfsdp", {2, 2}, {"inner", "outer"}},
    {"SS/SS/SS", {2, 2}, {"inner", "outer"}},
    {"optim_grads_params", {3, 1}, {}},
    {"optim_grads_params+hfsdp", {3, 1}, {"outer"}},
    {"optim_grads_params+hfsdp", {1, 1}, {}},
};

TEST(OptimizerCollectives, AreOneScalarPerShardedAxis) {
  const std::vector<StepOptions> needing_the_norm = {
      {.max_norm = 1.0},
      {.measures_norm = true},
      {.on_nonfinite = OnNonfinite::kSkip},
      {.loss_scale = LossScale::dynamic()},
      {.max_norm = 1.0, .measures_norm = true, .on_nonfinite = OnNonfinite::kSkip}};
  for (const NormAxes& row : kNormAxes)
    for (const double offloaded : {0.0, 0.5})
      for (size_t i = 0; i < needing_the_norm.size(); ++i) {
        SCOPED_TRACE(concat(row.strategy, " ", row.mesh.outer, "x", row.mesh.inner, ", offloaded ",
                            offloaded, ", options ", i));
        ShardOptions options{.strategy = parse_strategy(row.strategy)};
        options.offload.fraction = offloaded;
        std::vector<std::string> axes;
        for (const RecordedCall& call : record_update(options, row.mesh, needing_the_norm[i])) {
          if (tells_what_came(call)) continue;
          axes.emplace_back(is_outer(call) ? "outer" : "inner");
          EXPECT_EQ(call.print.tag.text(), "gradient norm") << call.print.text();
          EXPECT_EQ(call.print.kind, OpKind::kAllReduce) << call.print.text();
          EXPECT_EQ(call.print.reduce, ReduceOp::kSum) << call.print.text();
          EXPECT_EQ(call.print.wire, at::kDouble) << call.print.text();
          EXPECT_EQ(call.print.bytes, 8) << call.print.text();
        }
        EXPECT_EQ(axes, row.axes);
      }
}

TEST(OptimizerCollectives, AreNoneWhenNothingNeedsTheNormOrWhatCame) {
  constexpr WithoutGradient kUpdate = WithoutGradient::kUpdate;
  for (const NormAxes& row : kNormAxes) {
    SCOPED_TRACE(concat(row.strategy, " ", row.mesh.outer, "x", row.mesh.inner));
    const ShardOptions options{.strategy = parse_strategy(row.strategy)};
    EXPECT_EQ(record_update(options, row.mesh, {.without_gradient = kUpdate}).size(), 0u);
    const StepOptions scaled{.loss_scale = LossScale::fixed(8.0), .without_gradient = kUpdate};
    EXPECT_EQ(record_update(options, row.mesh, scaled).size(), 0u);
  }
}

TEST(OptimizerCollectives, TellOneNumberPerParameterAlongEveryAxis) {
  for (const NormAxes& row : kNormAxes) {
    SCOPED_TRACE(concat(row.strategy, " ", row.mesh.outer, "x", row.mesh.inner));
    const ShardOptions options{.strategy = parse_strategy(row.strategy)};
    std::vector<std::string> axes;
    for (const RecordedCall& call : record_update(options, row.mesh, {})) {
      axes.emplace_back(is_outer(call) ? "outer" : "inner");
      EXPECT_TRUE(tells_what_came(call)) << call.print.text();
      EXPECT_EQ(call.print.kind, OpKind::kAllReduce) << call.print.text();
      EXPECT_EQ(call.print.wire, at::kFloat) << call.print.text();
    }
    std::vector<std::string> expected;
    if (row.mesh.inner > 1) expected.emplace_back("inner");
    if (row.mesh.outer > 1) expected.emplace_back("outer");
    EXPECT_EQ(axes, expected);
  }
}

}  // namespace
}  // namespace fsdp::collectives_test
