// plan/: bytes and traffic by formula, from placements alone.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <optional>
#include <string>
#include <vector>

#include "fsdp/base/check.h"
#include "fsdp/plan/forecast.h"
#include "fsdp/plan/group_plan.h"
#include "fsdp/plan/load_model.h"
#include "fsdp/plan/pool_forecast.h"

namespace fsdp::plan_test {
namespace {

using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

// Equal units whose shards need no padding on up to 64 ranks: 2^16 elements are 128 KiB in bf16.
constexpr int64_t kUnitNumel = 1 << 16;

ModelShape stack(int64_t num_units) {
  ModelShape model{"stack", {}, {}};
  for (int64_t i = 0; i < num_units; ++i) {
    const std::string name = concat("layers.", i);
    model.units.push_back({name, {{name + ".weight", {256, 256}, {}}}});
    model.uses.push_back(i);
  }
  return model;
}

PlanOptions options_for(const std::string& strategy, int64_t ranks, int64_t outer = 1) {
  PlanOptions options;
  options.ranks = ranks;
  options.outer = outer;
  options.strategy = parse_strategy(strategy);
  options.pool = PoolKind::kMaxPool;
  options.precision.main_storage = MainStorage::kSeparate;
  return options;
}

Forecast plan(const ModelShape& model, const PlanOptions& options) {
  return Planner(model, options).forecast();
}

struct BytesPerParameter {
  const char* strategy;
  double weight, main_weight, main_grad, moments;
};

TEST(Forecast, HoldsWhatThePlacementsLeaveToOneRank) {
  // 8 ranks as 2 outer x 4 inner; bf16 weights and gradients, fp32 main weights and moments.
  constexpr double kInner = 4;
  constexpr double kAll = 8;
  const std::vector<BytesPerParameter> table = {
      {"no_shard", 2, 4, 2, 8},
      {"optim", 2, 4 / kInner, 2, 8 / kInner},
      {"optim_grads", 2, 4 / kInner, 2 / kInner, 8 / kInner},
      {"optim_grads_params", 2 / kInner, 4 / kInner, 2 / kInner, 8 / kInner},
      {"optim+hfsdp", 2, 4 / kAll, 2, 8 / kAll},
      {"optim_grads+hfsdp", 2, 4 / kAll, 2 / kInner, 8 / kAll},
      {"optim_grads_params+hfsdp", 2 / kInner, 4 / kAll, 2 / kInner, 8 / kAll},
      {"SS/SS/SS", 2 / kAll, 4 / kAll, 2 / kAll, 8 / kAll},
  };
  const ModelShape model = stack(6);
  const auto numel = static_cast<double>(model.parameters());
  for (const BytesPerParameter& row : table) {
    const MemoryBytes bytes = plan(model, options_for(row.strategy, 8, 2)).bytes;
    EXPECT_EQ(static_cast<double>(bytes.weight), row.weight * numel) << row.strategy;
    EXPECT_EQ(static_cast<double>(bytes.main_weight), row.main_weight * numel) << row.strategy;
    EXPECT_EQ(static_cast<double>(bytes.main_grad), row.main_grad * numel) << row.strategy;
    EXPECT_EQ(static_cast<double>(bytes.moments), row.moments * numel) << row.strategy;
    EXPECT_EQ(bytes.total(), bytes.weight + bytes.main_weight + bytes.main_grad + bytes.moments +
                                 bytes.weight_pool + bytes.grad_pool);
  }
}

TEST(Forecast, CountsAGroupPerDType) {
  ModelShape model = stack(1);
  model.units[0].tensors.push_back({"bias", {1 << 12}, DType::kFloat32});
  model.units[0].tensors.push_back({"steps", {1 << 12}, DType::kInt64});
  const MemoryBytes bytes = plan(model, options_for("optim_grads_params", 4)).bytes;
  const int64_t bf16 = kUnitNumel / 4;
  const int64_t other = (1 << 12) / 4;
  EXPECT_EQ(bytes.weight, 2 * bf16 + 4 * other + 8 * other);
  EXPECT_EQ(bytes.main_weight, 4 * bf16);            // the fp32 group is its own main weight
  EXPECT_EQ(bytes.main_grad, 2 * bf16 + 4 * other);  // whole numbers have no gradient
  EXPECT_EQ(bytes.moments, 2 * 4 * (bf16 + other));
}

TEST(Forecast, CountsTheFullestRankWhereTensorsAreNotCut) {
  // Two tensors per unit and four ranks: somebody holds one whole tensor of every unit.
  ModelShape model = stack(3);
  for (UnitShape& unit : model.units) unit.tensors.push_back({unit.name + ".b", {256, 256}, {}});
  PlanOptions options = options_for("optim_grads_params", 4);
  options.granularity = Granularity::tensor();
  const Forecast forecast = plan(model, options);
  EXPECT_GE(forecast.bytes.weight, 2 * kUnitNumel);
  EXPECT_LE(forecast.bytes.weight, 3 * 2 * kUnitNumel);
  EXPECT_EQ(forecast.bytes.main_weight, 2 * forecast.bytes.weight);
  EXPECT_EQ(forecast.padding_fraction, 0);
}

TEST(Forecast, EvensWholeTensorsOutOverTheUnits) {
  // 52 layers: nobody holds more than its eighth and one largest tensor, the head, which comes
  // last.
  PlanOptions options = options_for("optim_grads_params", 8);
  const ModelShape model = model_by_name("nemotron-h-8b");
  const int64_t even = plan(model, options).bytes.weight;
  const int64_t head = 2 * 131072 * 4096;
  options.granularity = Granularity::tensor();
  EXPECT_LE(plan(model, options).bytes.weight, even + head);
}

TEST(Pool, ExistsOnlyWhereSomethingIsSharded) {
  const ModelShape model = stack(6);
  const int64_t unit_bytes = 2 * kUnitNumel;
  const auto pools = [&](const char* strategy, int64_t ranks) {
    const MemoryBytes bytes = plan(model, options_for(strategy, ranks)).bytes;
    return std::pair(bytes.weight_pool / unit_bytes, bytes.grad_pool / unit_bytes);
  };
  EXPECT_EQ(pools("no_shard", 4), std::pair(0L, 0L));
  EXPECT_EQ(pools("optim", 4), std::pair(0L, 0L));
  EXPECT_EQ(pools("optim_grads", 4), std::pair(0L, 2L));
  EXPECT_EQ(pools("optim_grads_params", 4), std::pair(2L, 2L));
  EXPECT_EQ(pools("optim_grads_params", 1), std::pair(0L, 0L));
}

TEST(Pool, CastsBeforeReductionsInAnotherType) {
  const auto grad_pool = [](const ModelShape& model, const char* strategy, int64_t ranks,
                            int64_t outer, std::optional<DType> wire) {
    PlanOptions options = options_for(strategy, ranks, outer);
    options.precision.main_grads = DType::kFloat32;
    options.precision.grad_comm = wire;
    return plan(model, options).bytes.grad_pool;
  };
  // Two slots of the type that travels.
  EXPECT_EQ(grad_pool(stack(6), "optim_grads_params", 4, 1, std::nullopt), 2 * 4 * kUnitNumel);
  EXPECT_EQ(grad_pool(stack(6), "optim_grads_params", 4, 1, DType::kBFloat16), 2 * 2 * kUnitNumel);
  // The largest unit before the one reduction.
  ModelShape unlike = stack(3);
  unlike.units[1].tensors.push_back({"extra", {kUnitNumel}, {}});
  for (const char* strategy : {"no_shard", "optim"}) {
    EXPECT_EQ(grad_pool(unlike, strategy, 4, 1, DType::kFloat32), 0) << strategy;
    EXPECT_EQ(grad_pool(unlike, strategy, 4, 1, DType::kBFloat16), 2 * 2 * kUnitNumel) << strategy;
    EXPECT_EQ(grad_pool(unlike, strategy, 1, 1, DType::kBFloat16), 0) << strategy;
  }
  // A shard for the outer reduction.
  for (const char* strategy : {"optim_grads_params", "optim_grads_params+hfsdp"})
    EXPECT_EQ(grad_pool(stack(6), strategy, 8, 2, DType::kBFloat16),
              2 * 2 * kUnitNumel + 2 * kUnitNumel / 4)
        << strategy;
}

TEST(Pool, GrowsWithThePrefetch) {
  const ModelShape model = stack(12);
  for (const PoolKind pool : all_pool_kinds()) {
    PlanOptions options = options_for("optim_grads_params", 4);
    options.pool = pool;
    for (int64_t depth = 0; depth < 4; ++depth) {
      options.prefetch = depth;
      const MemoryBytes bytes = plan(model, options).bytes;
      // A chain of equal units: depth + 1 gathered at once, and two gradients.
      EXPECT_EQ(bytes.weight_pool, (depth + 1) * 2 * kUnitNumel) << name_of(pool) << depth;
      EXPECT_LE(bytes.grad_pool, 2 * 2 * kUnitNumel) << name_of(pool) << depth;
      EXPECT_GE(bytes.grad_pool, 2 * kUnitNumel) << name_of(pool) << depth;
    }
  }
}

TEST(Pool, HoldsUnlikeUnitsOnlyAroundTheirUseUnlessTheyPersist) {
  ModelShape model = stack(6);
  model.units[0].tensors.push_back({"extra", {kUnitNumel}, {}});
  model.units[5].tensors.push_back({"more", {kUnitNumel}, {}});
  PlanOptions options = options_for("optim_grads_params", 4);
  options.pool = PoolKind::kDoubleBuffer;
  const int64_t slots = 2 * 2 * kUnitNumel;  // of weights, and of gradients
  const int64_t one_unlike = 2 * 2 * kUnitNumel;
  EXPECT_EQ(plan(model, options).bytes.weight_pool, slots + one_unlike);
  options.other_units = OtherUnits::kPersistent;
  const MemoryBytes bytes = plan(model, options).bytes;
  EXPECT_EQ(bytes.weight_pool, slots + 2 * one_unlike);
  EXPECT_EQ(bytes.grad_pool, slots + 2 * one_unlike);
}

// Forward and backward gather each unit, but for those that stay from the one to the other. With
// prefetch k a unit is there k units before its backward, so the last 1 + k / 2 stay.
TEST(Pool, GathersEachUnitOfAStackTwiceButForTheLast) {
  const ModelShape model = stack(12);
  for (const int64_t prefetch : {0, 1, 2, 3, 4}) {
    PlanOptions options = options_for("optim_grads_params", 2);
    options.prefetch = prefetch;
    const std::vector<GroupPlan> groups = lay_out(model, options);
    EXPECT_EQ(groups.size(), model.units.size()) << "units of one type have one group";
    const std::vector<int64_t> gathers = forecast_pool(model, groups, options).num_gathers;
    EXPECT_EQ(std::accumulate(gathers.begin(), gathers.end(), int64_t{0}),
              2 * 12 - (1 + prefetch / 2));
  }
}

TEST(Pool, TakesTheDeepestPrefetchWithinABudget) {
  const ModelShape model = stack(12);
  PlanOptions options = options_for("optim_grads_params", 4);
  options.pool = PoolKind::kPlanned;
  for (int64_t depth = 0; depth < 4; ++depth) {
    options.pool_budget_bytes.reset();
    options.prefetch = depth;
    const MemoryBytes asked = plan(model, options).bytes;
    options.prefetch = 0;
    options.pool_budget_bytes = asked.weight_pool + asked.grad_pool;
    const Forecast chosen = plan(model, options);
    EXPECT_EQ(chosen.prefetch, depth);
    EXPECT_EQ(chosen.bytes.total(), asked.total());
  }
  options.pool_budget_bytes = 1000;
  EXPECT_THAT([&] { plan(model, options); }, ThrowsMessage<UsageError>(HasSubstr("1000")));
}

struct Moved {
  const char* strategy;
  int64_t outer;
  // In units of one unit's bf16 weights / 8, so that every entry is a whole number.
  AxisTraffic inner_moved, outer_moved;
};

TEST(Traffic, FollowsFromPlacements) {
  // 3 units, 8 ranks. Without prefetch the order 0 1 2 2 1 0 gathers 5 times: the last unit of the
  // forward pass is still there when the backward pass begins.
  constexpr int64_t kGathers = 5;
  constexpr int64_t kUnits = 3;
  const std::vector<Moved> table = {
      {"no_shard", 1, {.all_reduce = kUnits * 14}, {}},
      {"optim", 1, {.all_gather = kUnits * 7, .reduce_scatter = kUnits * 7}, {}},
      {"optim_grads", 1, {.all_gather = kUnits * 7, .reduce_scatter = kUnits * 7}, {}},
      {"optim_grads_params", 1, {.all_gather = kGathers * 7, .reduce_scatter = kUnits * 7}, {}},
      // 2 outer x 4 inner: 3/4 of a unit inside, and of what is left (a quarter) half outside.
      {"no_shard", 2, {.all_reduce = kUnits * 12}, {.all_reduce = kUnits * 8}},
      {"optim",
       2,
       {.all_gather = kUnits * 6, .reduce_scatter = kUnits * 6},
       {.all_reduce = kUnits * 2}},
      {"optim_grads_params",
       2,
       {.all_gather = kGathers * 6, .reduce_scatter = kUnits * 6},
       {.all_reduce = kUnits * 2}},
      {"optim+hfsdp",
       2,
       {.all_gather = kUnits * 6, .reduce_scatter = kUnits * 6},
       {.all_gather = kUnits * 1, .reduce_scatter = kUnits * 1}},
      {"optim_grads_params+hfsdp",
       2,
       {.all_gather = kGathers * 6, .reduce_scatter = kUnits * 6},
       {.all_gather = kUnits * 1, .reduce_scatter = kUnits * 1}},
      {"SS/SS/SS",
       2,
       {.all_gather = kGathers * 6, .reduce_scatter = kUnits * 6},
       {.all_gather = kGathers * 1, .reduce_scatter = kUnits * 1}},
  };
  const int64_t unit = 2 * kUnitNumel / 8;
  for (const Moved& row : table) {
    PlanOptions options = options_for(row.strategy, 8, row.outer);
    options.prefetch = 0;
    const Traffic traffic = plan(stack(kUnits), options).traffic;
    const auto expect = [&](const AxisTraffic& got, const AxisTraffic& want, const char* axis) {
      EXPECT_EQ(got.all_gather, want.all_gather * unit) << row.strategy << " " << axis;
      EXPECT_EQ(got.reduce_scatter, want.reduce_scatter * unit) << row.strategy << " " << axis;
      EXPECT_EQ(got.all_reduce, want.all_reduce * unit) << row.strategy << " " << axis;
    };
    expect(traffic.inner, row.inner_moved, "inner");
    expect(traffic.outer, row.outer_moved, "outer");
  }
}

TEST(Traffic, TravelsInTheWireTypeAndNotOnOneRank) {
  PlanOptions options = options_for("optim_grads_params", 8);
  options.precision.main_grads = DType::kFloat32;
  const ModelShape model = stack(3);
  const int64_t wide = plan(model, options).traffic.inner.reduce_scatter;
  options.precision.grad_comm = DType::kBFloat16;
  EXPECT_EQ(plan(model, options).traffic.inner.reduce_scatter * 2, wide);
  for (const char* strategy : {"no_shard", "optim", "optim_grads", "optim_grads_params"})
    EXPECT_EQ(plan(model, options_for(strategy, 1)).traffic.sum().total(), 0) << strategy;
}

TEST(Traffic, GathersAgainForEachUse) {
  ModelShape model = stack(8);
  PlanOptions options = options_for("optim_grads_params", 4);
  const int64_t once = plan(model, options).traffic.inner.all_gather;
  model.uses.push_back(0);  // like the embedding that multi-token prediction uses again
  const int64_t unit = 2 * kUnitNumel * 3 / 4;
  // One more for that use, which ends the forward pass and starts the backward one; and unit 7,
  // which did both before, is now gathered for each.
  EXPECT_EQ(plan(model, options).traffic.inner.all_gather, once + 2 * unit);
}

TEST(Planner, ComparesWhatTheMeshCanTellApart) {
  const auto names = [](const std::vector<Forecast>& forecasts) {
    std::vector<std::string> found;
    for (const Forecast& forecast : forecasts) found.push_back(to_text(forecast.options.strategy));
    return found;
  };
  EXPECT_EQ(names(Planner(stack(3), options_for("no_shard", 8)).forecast_all()),
            (std::vector<std::string>{"no_shard", "optim", "optim_grads", "optim_grads_params"}));
  EXPECT_EQ(names(Planner(stack(3), options_for("no_shard", 8, 2)).forecast_all()).size(),
            named_strategies().size());
}

TEST(PlanOptions, NameFieldValueAndFix) {
  const auto refusal = [](const char* strategy, const auto& change) -> std::string {
    PlanOptions options = options_for(strategy, 8);
    change(options);
    try {
      options.validate();
    } catch (const UsageError& error) {
      return error.what();
    }
    return "accepted";
  };
  EXPECT_EQ(refusal("optim_grads_params", [](PlanOptions&) {}), "accepted");
  EXPECT_THAT(refusal("optim", [](PlanOptions& o) { o.ranks = 0; }), HasSubstr("ranks is 0"));
  EXPECT_THAT(refusal("optim", [](PlanOptions& o) { o.prefetch = -1; }),
              HasSubstr("prefetch is -1"));
  for (const double fraction : {-0.1, 1.1, std::nan("")})
    EXPECT_THAT(refusal("optim", [&](PlanOptions& o) { o.offload = fraction; }),
                HasSubstr("it must be a fraction from 0 to 1"));
  EXPECT_THAT(
      refusal("optim", [](PlanOptions& o) { o.strategy.parameter.inner = Placement::kPartial; }),
      HasSubstr("only gradients are sums"));
}

}  // namespace
}  // namespace fsdp::plan_test
