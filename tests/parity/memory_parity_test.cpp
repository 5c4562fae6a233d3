// The engine's memory equals its own report and the forecast of `fsdp plan`, byte for byte.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <tuple>
#include <vector>

#include "fsdp/base/text.h"
#include "fsdp/optim/adamw.h"
#include "fsdp/plan/forecast.h"
#include "fsdp/shard/engine/engine.h"
#include "fsdp/shard/fully_shard.h"
#include "support/counting_allocator.h"
#include "support/parity.h"
#include "support/run_ranks.h"

namespace fsdp::memory_parity_test {
namespace {

using testing::CountingHostAllocator;
using testing::make_batch;
using testing::make_model;
using testing::ModelKind;
using testing::ParityCase;
using testing::ParityModel;
using testing::Precision;
using testing::run_ranks;
using testing::UpdatedBy;

// The model as planning sees it: units in order, each with its tensors.
ModelShape shape_of(const ParityModel& model) {
  ModelShape shape{.name = "parity", .units = {}, .uses = {}};
  for (const auto& [name, parameter] : testing::distinct_parameters(model)) {
    const std::string unit = name.substr(0, name.find('.'));
    if (shape.units.empty() || shape.units.back().name != unit) {
      shape.uses.push_back(static_cast<int64_t>(shape.units.size()));
      shape.units.push_back({unit, {}});
    }
    shape.units.back().tensors.push_back({name, parameter.sizes().vec(), std::nullopt});
  }
  return shape;
}

MemoryBytes forecast_of(const ParityCase& parity) {
  const ShardOptions options = parity.options();
  PlanOptions plan{
      .ranks = parity.ranks(),
      .outer = parity.outer,
      .compute = parity.precision == Precision::kFp32 ? DType::kFloat32 : DType::kBFloat16,
      .precision = options.precision.types(),
      .pool = parity.pool,
      .prefetch = options.prefetch};
  const auto model = make_model(parity.model, parity.compute());
  return Planner(shape_of(*model), plan).forecast(options.strategy).bytes;
}

// One training step; `check` is called wherever a program could ask for the memory.
template <typename Check>
void run_step(const ParityCase& parity, ParityModel& model, const Sharded& sharded, int rank,
              int step, const Check& check) {
  for (int i = 0; i < parity.microbatches; ++i) {
    sharded.microbatch({.last = i + 1 == parity.microbatches});
    const at::Tensor loss =
        model.summed_loss(make_batch(parity.model, rank, step, i, parity.compute()));
    check("after a forward");
    loss.backward();
    check("after a backward");
  }
  sharded.wait_gradients();
  check("with reduced gradients");
  sharded.refresh_weights();
  check("with new weights");
  sharded.zero_grad();
  check("after zero_grad");
}

class Memory : public ::testing::TestWithParam<std::tuple<std::string, PoolKind>> {
 protected:
  static ParityCase parity_case() {
    ParityCase parity;
    std::tie(parity.strategy, parity.pool) = GetParam();
    parity.microbatches = 2;
    parity.precision = Precision::kBf16Wire;
    return parity;
  }
};

TEST_P(Memory, ReportIsWhatTheAllocatorCounted) {
  ParityCase parity = parity_case();
  parity.outer = parity.inner = 2;
  for (const ModelKind model : {ModelKind::kMlp, ModelKind::kHybrid})
    for (const auto lifetime : {GradientLifetime::kPersistent, GradientLifetime::kStep}) {
      parity.model = model;
      parity.lifetime = lifetime;
      SCOPED_TRACE(parity.name());
      run_ranks(parity.ranks(), [&](World& world) {
        const Mesh mesh = world.mesh({.outer = parity.outer});
        CountingHostAllocator allocator;
        {
          ShardOptions options = parity.options();
          options.allocator = &allocator;
          const auto module = make_model(parity.model, parity.compute());
          const Sharded sharded = fully_shard(module, mesh, options);
          const auto check = [&](const char* when) {
            EXPECT_EQ(sharded.memory().total_bytes(), allocator.live_bytes()) << when;
            EXPECT_EQ(sharded.memory().peak_bytes, allocator.peak_bytes()) << when;
          };
          check("after fully_shard");
          for (int step = 0; step < 3; ++step)
            run_step(parity, *module, sharded, world.rank(), step, check);
          {
            const auto whole = sharded.full_parameters();
            check("with whole parameters");
          }
          check("after them");
        }
        EXPECT_EQ(allocator.live_bytes(), 0) << "the model is gone";
      });
    }
}

void expect_forecast(const ParityCase& parity) {
  SCOPED_TRACE(parity.name());
  const MemoryBytes forecast = forecast_of(parity);
  run_ranks(parity.ranks(), [&](World& world) {
    const Mesh mesh = world.mesh({.outer = parity.outer});
    CountingHostAllocator allocator;
    ShardOptions options = parity.options();
    options.allocator = &allocator;
    const auto model = make_model(parity.model, parity.compute());
    const Sharded sharded = fully_shard(model, mesh, options);
    const MemoryReport at_rest = sharded.memory();
    EXPECT_EQ(at_rest.weight_bytes, forecast.weight);
    EXPECT_EQ(at_rest.main_weight_bytes, forecast.main_weight);
    EXPECT_EQ(at_rest.main_grad_bytes, forecast.main_grad);
    for (int step = 0; step < 3; ++step) {
      allocator.restart_peak();
      run_step(parity, *model, sharded, world.rank(), step, [](const char*) {});
      EXPECT_EQ(allocator.peak_bytes(), forecast.total()) << "step " << step;
    }
  });
}

TEST_P(Memory, PeakOfAStepIsTheForecast) {
  ParityCase parity = parity_case();
  parity.model = ModelKind::kLlama;
  const bool shards_outer = parse_strategy(parity.strategy).optimizer.outer == Placement::kShard;
  for (const auto& [outer, inner] : {std::pair(1, 1), std::pair(1, 3), std::pair(2, 2)}) {
    if (shards_outer && outer == 1) continue;  // the plan refuses that
    for (const Precision precision : {Precision::kFp32, Precision::kBf16Wire}) {
      parity.outer = outer;
      parity.inner = inner;
      parity.precision = precision;
      expect_forecast(parity);
    }
  }
}

std::string case_name(const ::testing::TestParamInfo<Memory::ParamType>& each) {
  std::string name = concat(std::get<0>(each.param), "_", name_of(std::get<1>(each.param)));
  std::replace_if(
      name.begin(), name.end(), [](char c) { return c == '+' || c == '/'; }, '_');
  return name;
}

// The optimizer's memory, on the device and on the host. No type keeps scales here, because those
// depend on where shards end (docs/plan.md).
TEST(OptimizerMemory, IsTheForecast) {
  for (const char* strategy : {"no_shard", "optim", "optim_grads_params", "SS/SS/SS"})
    for (const Precision precision : {Precision::kFp32, Precision::kBf16})
      for (const MainStorage storage : {MainStorage::kSplit, MainStorage::kSeparate})
        for (const double fraction : {0.0, 0.3, 1.0}) {
          ParityCase parity{.model = ModelKind::kLlama,
                            .strategy = strategy,
                            .outer = 2,
                            .inner = 2,
                            .precision = precision,
                            .updated_by = UpdatedBy::kOurs};
          ShardOptions options = parity.options();
          options.precision.main_storage = storage;
          options.offload.fraction = fraction;
          SCOPED_TRACE(concat(parity.name(), " ", name_of(storage), " ", fraction));
          PlanOptions plan{
              .ranks = parity.ranks(),
              .outer = parity.outer,
              .compute = precision == Precision::kFp32 ? DType::kFloat32 : DType::kBFloat16,
              .precision = options.precision.types(),
              .pool = parity.pool,
              .prefetch = options.prefetch};
          plan.offload = fraction;
          plan.precision.first_moment = DType::kBFloat16;
          plan.precision.second_moment = DType::kFloat32;
          const auto shape = shape_of(*make_model(parity.model, parity.compute()));
          const MemoryBytes forecast = Planner(shape, plan).forecast(options.strategy).bytes;
          run_ranks(parity.ranks(), [&](World& world) {
            const Mesh mesh = world.mesh({.outer = parity.outer});
            const auto model = make_model(parity.model, parity.compute());
            const Sharded sharded = fully_shard(model, mesh, options);
            const AdamW optimizer(sharded, {.first_moment = at::kBFloat16});
            const MemoryReport memory = sharded.memory();
            const MemoryLedger& host = EngineAccess::of(sharded).memory().host_ledger();
            EXPECT_EQ(memory.weight_bytes, forecast.weight);
            EXPECT_EQ(memory.main_weight_bytes, forecast.main_weight);
            EXPECT_EQ(memory.moment_bytes, forecast.moments);
            EXPECT_EQ(host.bytes(MemoryKind::kMainWeight), forecast.host.main_weight);
            EXPECT_EQ(host.bytes(MemoryKind::kMoment), forecast.host.moments);
          });
        }
}

INSTANTIATE_TEST_SUITE_P(
    Cases, Memory,
    ::testing::Combine(::testing::Values("no_shard", "optim", "optim_grads", "optim_grads_params",
                                         "optim+hfsdp", "optim_grads+hfsdp",
                                         "optim_grads_params+hfsdp", "RS/PP/RS"),
                       ::testing::ValuesIn(all_pool_kinds().begin(), all_pool_kinds().end())),
    case_name);

}  // namespace
}  // namespace fsdp::memory_parity_test
