// What --calibrate measures: all that a forecast asks for, and no less if something fails.
#include "fsdp/train/calibration/calibration.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "fsdp/plan/model_tensors.h"
#include "fsdp/plan/time_forecast.h"

namespace fsdp::calibration_test {
namespace {

using ::testing::Contains;
using ::testing::Each;
using ::testing::Gt;
using ::testing::HasSubstr;
using ::testing::Not;

train::CalibrationOptions small_calibration() {
  train::CalibrationOptions options;
  options.sizes = {.tokens = {4, 16},
                   .widths = {16, 32},
                   .head_width = 64,
                   .code_tokens = {16},
                   .code_widths = {16, 32},
                   .elements = {64, 4096},
                   .update_elements = {64, 4096},
                   .attention_rows = {2, 4},
                   .sequences = {8},
                   .head_dims = {16},
                   .experts = {2, 4},
                   .expert_rows = {16, 64},
                   .expert_widths = {16, 32}};
  options.host_layers = {1, 2};
  options.offloaded_elements = {1 << 17};
  options.links = {.ranks = {2}, .bytes = {64, 4096}};
  return options;
}

TEST(Calibration, MeasuresAllThatAForecastAsksFor) {
  train::CalibrationOptions small = small_calibration();
  small.progress = [](const std::string& line) { EXPECT_THAT(line, Not(HasSubstr("left out"))); };
  const RateTable measured = train::calibrate(small);
  const RateTable table = parse_rates(rates_text(measured), "rates");
  EXPECT_EQ(table.device, "cpu");
  EXPECT_GT(table.cores, 0);
  for (const RateGrid& grid : table.grids) EXPECT_THAT(grid.us, Each(Gt(0.0))) << grid.work;
  PlanOptions options{.ranks = 2, .compute = DType::kFloat32};
  const LlamaConfig config{.vocab_size = 64,
                           .hidden_size = 32,
                           .num_hidden_layers = 2,
                           .num_attention_heads = 2,
                           .num_key_value_heads = 2,
                           .intermediate_size = 48,
                           .attention_bias = true,
                           .qk_norm = true};
  const auto forecast = [&](const ModelConfig& model) {
    const Planner planner(build_model("small", model), options);
    return forecast_time(planner.model(), planner.groups(), planner.forecast(),
                         {.batch = {.rows = 2, .sequence = 16}}, {}, table)
        .step;
  };
  for (const WeightRecipe recipe : {WeightRecipe::kPlain, WeightRecipe::kFp8Row})
    for (const double offload : {0.0, 0.5}) {
      options.weights = recipe;
      options.offload = offload;
      const SimulatedStep step = forecast(config);
      EXPECT_GT(step.compute, 0.0);
      EXPECT_GT(step.gather, 0.0);
    }
  options = {.ranks = 2, .compute = DType::kFloat32, .muon = DType::kFloat32};
  EXPECT_GT(forecast(config).update, 0.0);
  options = {.ranks = 2, .ep = 2, .compute = DType::kFloat32};
  EXPECT_GT(forecast(MixtralConfig{.decoder = config, .num_local_experts = 4}).exchange, 0.0);
  options = {.ranks = 2, .tp = 2, .compute = DType::kFloat32};
  EXPECT_GT(forecast(config).exchange, 0.0);
}

TEST(Calibration, LosesOnlyTheWorkThatFails) {
  train::CalibrationOptions options = small_calibration();
  options.sizes.attention_rows = {int64_t{1} << 50};  // more than any memory
  options.host_layers = {1};
  std::vector<std::string> lines;
  options.progress = [&](const std::string& line) { lines.push_back(line); };
  const RateTable table = train::calibrate(options);
  EXPECT_EQ(table.find("attention fp32 forward"), nullptr);
  EXPECT_NE(table.find("product fp32 forward"), nullptr);
  EXPECT_NE(table.find("update fp32"), nullptr);
  EXPECT_THAT(lines, Contains(HasSubstr("left out: ")));
}

}  // namespace
}  // namespace fsdp::calibration_test
