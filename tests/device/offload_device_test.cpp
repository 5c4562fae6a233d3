// Optimizer state in host memory for a model on a GPU: the same bits as on the device, no more
// bytes on the bus than gradients and weights have, and only the host's own queue waits.
#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdio>
#include <set>
#include <string>
#include <tuple>
#include <vector>

#include "fsdp/base/text.h"
#include "fsdp/nn/language_model.h"
#include "fsdp/optim/adamw.h"
#include "fsdp/plan/forecast.h"
#include "fsdp/plan/model_tensors.h"
#include "fsdp/shard/fully_shard.h"
#include "support/device_trace.h"
#include "support/llama_training.h"
#include "support/require.h"
#include "support/run_ranks.h"
#include "support/small_models.h"

namespace fsdp::offload_device_test {
namespace {

using testing::DeviceSpan;
using testing::run_ranks;

struct Result {
  std::vector<double> losses;
  std::vector<at::Tensor> weights;
  std::vector<at::Tensor> moments;
};

Result train(World& world, const Offload& offload, at::ScalarType dtype, double max_norm) {
  const Mesh mesh = world.mesh();
  const auto model = build_language_model(testing::small_llama(), {.seed = 3, .dtype = dtype});
  model->to(at::kCUDA);
  const Sharded sharded =
      fully_shard(model, mesh, {.precision = {.main_grads = at::kFloat}, .offload = offload});
  AdamW optimizer(sharded, {.lr = 1e-2, .step = {.max_norm = max_norm}});
  Result result;
  for (int number = 0; number < 8; ++number) {
    const at::Tensor tokens = testing::small_tokens(world.rank(), number % 3).cuda();
    const at::Tensor total = testing::small_loss(*model, tokens).total;
    total.backward();
    optimizer.step();
    optimizer.zero_grad();
    result.losses.push_back(total.item<double>());
  }
  optimizer.wait();
  for (const OptimizerShard& shard : optimizer.shards()) result.moments.push_back(shard.values);
  const auto whole = sharded.full_parameters();
  for (const at::Tensor& parameter : model->parameters()) result.weights.push_back(parameter.cpu());
  return result;
}

void expect_same(const std::vector<at::Tensor>& actual, const std::vector<at::Tensor>& expected,
                 const std::string& what) {
  ASSERT_EQ(actual.size(), expected.size());
  for (size_t i = 0; i < expected.size(); ++i)
    EXPECT_TRUE(at::equal(actual[i], expected[i]))
        << what << " " << i << " differs by "
        << (actual[i].to(at::kDouble) - expected[i].to(at::kDouble)).abs().max().item<double>();
}

using Case = std::tuple<int, at::ScalarType, double>;  // ranks, weights, max_norm
class OffloadOnDevice : public ::testing::TestWithParam<Case> {};

TEST_P(OffloadOnDevice, ChangesNoBit) {
  FSDP_REQUIRE_GPU();
  run_ranks(std::get<0>(GetParam()), [&](World& world) {
    const at::ScalarType dtype = std::get<1>(GetParam());
    const double max_norm = std::get<2>(GetParam());
    const Result expected = train(world, {}, dtype, max_norm);
    // Chunks so small that every slot is used several times.
    for (const Offload& offload : {Offload{.fraction = 0.3, .chunk_numel = 256},
                                   Offload{.fraction = 0.5, .pin = false, .chunk_numel = 256},
                                   Offload{.fraction = 1.0, .chunk_numel = 256},
                                   Offload{.fraction = 1.0, .overlap = false}}) {
      SCOPED_TRACE(concat("fraction ", offload.fraction, " rank ", world.rank()));
      const Result actual = train(world, offload, dtype, max_norm);
      EXPECT_EQ(actual.losses, expected.losses);
      expect_same(actual.weights, expected.weights, "parameter");
      expect_same(actual.moments, expected.moments, "moment");
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Cases, OffloadOnDevice,
                         ::testing::Combine(::testing::Values(1, 2),
                                            ::testing::Values(at::kFloat, at::kBFloat16),
                                            ::testing::Values(0.0, 0.5)),
                         [](const auto& test) {
                           return concat("ranks", std::get<0>(test.param), "_",
                                         c10::toString(std::get<1>(test.param)),
                                         std::get<2>(test.param) > 0 ? "_clipped" : "");
                         });

class Bus : public ::testing::TestWithParam<double> {};

// bf16 weights with fp32 gradients: 4 bytes go down and 2 up for each element on the host, and the
// step's few numbers.
TEST_P(Bus, CarriesGradientsDownAndWeightsUpAndNothingElse) {
  FSDP_REQUIRE_GPU();
  constexpr int kSteps = 2;
  const double fraction = GetParam();
  const LlamaConfig config = testing::wide_llama();
  const PlanOptions plan{.offload = fraction};
  const int64_t numel =
      Planner(build_model("wide", ModelConfig(config)), plan).forecast().bytes.host.main_weight / 4;
  testing::DeviceTrace trace;
  run_ranks(1, [&](World& world) {
    testing::LlamaTraining training(world, {.offload = {.fraction = fraction}},
                                    {.config = config, .rows = 4, .sequence = 2048});
    training.steps(3);
    training.optimizer().wait();
    trace = testing::trace_device(world, [&] {
      training.steps(kSteps);
      training.optimizer().wait();
    });
  });
  const auto down = [](const DeviceSpan& span) { return span.is_named("Memcpy DtoH"); };
  const auto up = [](const DeviceSpan& span) { return span.is_named("Memcpy HtoD"); };
  EXPECT_EQ(trace.bytes(down), kSteps * (4 * numel + static_cast<int64_t>(sizeof(StepState))));
  EXPECT_EQ(trace.bytes(up), kSteps * 2 * numel);
  EXPECT_EQ(trace.count([&](const DeviceSpan& span) {
    return (down(span) || up(span)) && !span.is_named("Pinned");
  }),
            0)
      << "memory that is not page-locked";

  std::set<int64_t> waiting;
  for (const testing::HostCall& call : trace.waits()) waiting.insert(call.thread);
  const std::set<int64_t> launching = trace.launching_threads();
  for (const int64_t thread : waiting)
    EXPECT_FALSE(launching.contains(thread)) << "thread " << thread << " launches and waits";
  EXPECT_LE(waiting.size(), 1U);

  // Copies of the state begin each step.
  std::vector<double> begins;
  for (const DeviceSpan& span : trace.spans())
    if (down(span) && span.bytes == static_cast<int64_t>(sizeof(StepState)))
      begins.push_back(span.begin_us);
  ASSERT_EQ(begins.size(), static_cast<size_t>(kSteps));
  const double end = std::max(begins[0], begins[1]);
  double first_up = end;
  double last_up = 0;
  double last_down = 0;
  for (const DeviceSpan& span : trace.spans()) {
    if (span.begin_us >= end) continue;
    if (up(span)) first_up = std::min(first_up, span.begin_us);
    if (up(span)) last_up = std::max(last_up, span.end_us);
    if (down(span)) last_down = std::max(last_down, span.begin_us);
  }
  EXPECT_LT(first_up, last_down) << "weights go up while gradients still come down";
  EXPECT_GT(trace.count([&](const DeviceSpan& span) {
    return testing::is_computing(span) && span.begin_us > first_up && span.begin_us < last_up;
  }),
            0)
      << "the next forward begins before all weights are there";
  EXPECT_NE(trace.streams_of(down), trace.streams_of(up));
  if (HasFailure()) std::printf("%s", trace.text().c_str());
}

INSTANTIATE_TEST_SUITE_P(Fractions, Bus, ::testing::Values(0.5, 1.0), [](const auto& test) {
  return concat("percent", static_cast<int>(100 * test.param));
});

}  // namespace
}  // namespace fsdp::offload_device_test
