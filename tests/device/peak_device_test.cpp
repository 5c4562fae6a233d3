// The most memory of a step, as libtorch's allocator counts it, is what `fsdp plan` says it is.
#include <ATen/ATen.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <gtest/gtest.h>

#include <cstdio>
#include <map>
#include <string>
#include <tuple>
#include <vector>

#include "fsdp/base/text.h"
#include "fsdp/nn/config/presets.h"
#include "fsdp/plan/model_tensors.h"
#include "fsdp/plan/peak_forecast.h"
#include "support/allocation_log.h"
#include "support/llama_training.h"
#include "support/require.h"

namespace fsdp::peak_device_test {
namespace {

using testing::AllocationLog;
using testing::LlamaTraining;

// A share of the whole peak: blocks are rounded up, and kernels choose their own workspaces.
constexpr double kMeasured = 0.02;
// Gated DeltaNets are many operations of libtorch's, whose own tensors are counted roughly.
constexpr double kRoughly = 0.06;

struct Shape {
  const char* name;
  ModelConfig config;
  BatchShape batch;
  double tolerance = kMeasured;
  bool recomputes_blocks = false;
  WeightRecipe weights = WeightRecipe::kPlain;
};

ModelConfig preset(const char* name) { return find_preset(name)->config; }

// The activations of its second prediction are not known.
NemotronHConfig hybrid_experts() {
  auto config = std::get<NemotronHConfig>(preset("hybrid-moe-tiny"));
  config.num_nextn_predict_layers = 0;
  return config;
}

MixtralConfig odd_experts(const LlamaConfig& decoder) {
  return {.decoder = decoder, .num_local_experts = 8, .num_experts_per_tok = 2};
}

LlamaConfig odd_llama(int64_t layers) {
  return {.vocab_size = 5000,
          .hidden_size = 640,
          .num_hidden_layers = layers,
          .num_attention_heads = 10,
          .num_key_value_heads = 5,
          .intermediate_size = 1792};
}

std::vector<Shape> shapes() {
  return {{"odd", odd_llama(6), {.rows = 16, .sequence = 768}},
          {"llama_110m", preset("llama-110m"), {.rows = 4, .sequence = 512}},
          {"llama_1b", preset("llama-1b"), {.rows = 4, .sequence = 2048}},
          {"again", odd_llama(6), {.rows = 16, .sequence = 768}, kMeasured, true},
          {"experts", odd_experts(odd_llama(4)), {.rows = 8, .sequence = 768}},
          {"hybrid", preset("hybrid-tiny"), {.rows = 64, .sequence = 512}},
          {"hybrid_experts", hybrid_experts(), {.rows = 64, .sequence = 512}},
          {"delta_net", preset("delta-tiny"), {.rows = 64, .sequence = 512}, kRoughly},
          {"llama_110m_fp8",
           preset("llama-110m"),
           {.rows = 4, .sequence = 512},
           kMeasured,
           false,
           WeightRecipe::kFp8Row},
          {"odd_fp8",
           odd_llama(6),
           {.rows = 16, .sequence = 768},
           kMeasured,
           false,
           WeightRecipe::kFp8Row}};
}

PeakForecast planned(const Shape& shape, GradientLifetime lifetime) {
  PlanOptions options{.precision = {.main_grads = DType::kFloat32},
                      .weights = shape.weights,
                      .pool = PoolKind::kMaxPool};
  const Planner planner(build_model(shape.name, shape.config), options);
  return forecast_peak(planner.model(), planner.groups(), planner.forecast(),
                       {.batch = shape.batch,
                        .gradient_lifetime = lifetime,
                        .recomputes_blocks = shape.recomputes_blocks});
}

struct Measured {
  int64_t before_bytes = 0;              // given out to what ran before it
  int64_t peak_bytes = 0;                // given out, of this training
  int64_t between_bytes = 0;             // the same between two steps
  int64_t reserved_bytes = 0;            // taken from the driver
  int64_t context_bytes = 0;             // of the device, and not the allocator's
  std::map<int64_t, int64_t> live = {};  // sizes of the blocks of the peak's step, with their count
  std::map<int64_t, int64_t> saved = {};  // of those that a forward leaves
};

Measured measured(World& world, const Shape& shape, GradientLifetime lifetime) {
  constexpr auto kAll = static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE);
  c10::DeviceAllocator* allocator = c10::getDeviceAllocator(at::kCUDA);
  allocator->emptyCache();
  const int64_t before = allocator->getDeviceStats(0).allocated_bytes[kAll].current;
  LlamaTraining training(
      world, {.quantization = {.recipe = shape.weights}, .gradient_lifetime = lifetime},
      {.config = shape.config,
       .rows = shape.batch.rows,
       .sequence = shape.batch.sequence,
       .recompute = shape.recomputes_blocks ? Recompute::kBlock : Recompute::kNone});
  training.steps(2);
  training.optimizer().wait();
  training.finish();
  allocator->resetPeakStats(0);
  Measured result{.before_bytes = before};
  result.between_bytes = allocator->getDeviceStats(0).allocated_bytes[kAll].current - before;
  training.steps(2);
  training.optimizer().wait();
  training.finish();
  const auto stats = allocator->getDeviceStats(0);
  const auto [free_bytes, total_bytes] = allocator->getMemoryInfo(0);
  result.peak_bytes = stats.allocated_bytes[kAll].peak - before;
  result.reserved_bytes = stats.reserved_bytes[kAll].current;
  result.context_bytes =
      static_cast<int64_t>(total_bytes - free_bytes) - stats.reserved_bytes[kAll].current;
  const AllocationLog log;
  const at::Tensor loss = training.model().loss(training.tokens(), training.tokens()).total;
  result.saved = log.live();
  loss.backward();
  result.live = log.live_at_peak();
  training.optimizer().step();
  training.optimizer().zero_grad();
  training.optimizer().wait();
  return result;
}

std::string text(const std::map<int64_t, int64_t>& sizes) {
  std::string words;
  for (const auto& [size, count] : sizes) words += concat(" ", count, " x ", size);
  return words;
}

class PeakOnDevice : public ::testing::TestWithParam<std::tuple<size_t, GradientLifetime>> {};

TEST_P(PeakOnDevice, IsThatOfThePlan) {
  FSDP_REQUIRE_GPU();
  at::globalContext().lazyInitDevice(at::kCUDA);  // or the allocator knows no device
  World world = World::from_environment();
  const auto& [index, lifetime] = GetParam();
  const Shape shape = shapes()[index];
  const PeakForecast plan = planned(shape, lifetime);
  const auto [free_bytes, total_bytes] = c10::getDeviceAllocator(at::kCUDA)->getMemoryInfo(0);
  if (static_cast<double>(free_bytes) < 1.2 * static_cast<double>(plan.total()))
    GTEST_SKIP() << "the GPU has too little memory for " << shape.name;
  const Measured actual = measured(world, shape, lifetime);
  std::printf(
      "%s: planned %.1f MB (state %.1f, gradients %.1f, activations %.1f, working %.1f), "
      "before %.1f, measured %.1f, between steps %.1f, reserved %.1f, context %.1f\n",
      shape.name, static_cast<double>(plan.allocated()) / 1e6,
      static_cast<double>(plan.state) / 1e6, static_cast<double>(plan.gradients) / 1e6,
      static_cast<double>(plan.activations) / 1e6, static_cast<double>(plan.working) / 1e6,
      static_cast<double>(actual.before_bytes) / 1e6, static_cast<double>(actual.peak_bytes) / 1e6,
      static_cast<double>(actual.between_bytes) / 1e6,
      static_cast<double>(actual.reserved_bytes) / 1e6,
      static_cast<double>(actual.context_bytes) / 1e6);
  EXPECT_NEAR(static_cast<double>(actual.peak_bytes), static_cast<double>(plan.allocated()),
              shape.tolerance * static_cast<double>(plan.allocated()))
      << "blocks at the peak:" << text(actual.live)
      << "\nleft by the forward:" << text(actual.saved);
}

INSTANTIATE_TEST_SUITE_P(
    Shapes, PeakOnDevice,
    ::testing::Combine(::testing::Range(size_t{0}, shapes().size()),
                       ::testing::Values(GradientLifetime::kStep, GradientLifetime::kPersistent)),
    [](const auto& test) {
      return concat(shapes()[std::get<0>(test.param)].name,
                    std::get<1>(test.param) == GradientLifetime::kStep ? "_step" : "_persistent");
    });

}  // namespace
}  // namespace fsdp::peak_device_test
