// The parts of models that --calibrate measures: all that a forecast of the same run asks for, and
// no less if one run fails.
#include "fsdp/train/calibration.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "fsdp/plan/model_tensors.h"
#include "fsdp/plan/time_forecast.h"

namespace fsdp::calibration_test {
namespace {

using ::testing::Contains;
using ::testing::HasSubstr;
using ::testing::Not;
using train::CalibratedRun;

LlamaConfig small_config() {
  return {.vocab_size = 64,
          .hidden_size = 32,
          .num_hidden_layers = 8,  // of which fewer are measured
          .num_attention_heads = 2,
          .num_key_value_heads = 2,
          .intermediate_size = 48};
}

CalibratedRun run_of(const ModelConfig& config) {
  CalibratedRun run{
      .model = {.name = "small", .config = config}, .options = {}, .rows = 2, .sequence = 16};
  run.options.device = train::DeviceChoice::kCpu;
  return run;
}

train::CalibrationOptions few_steps(std::vector<CalibratedRun> runs) {
  return {.seconds = 0, .runs = std::move(runs)};
}

TEST(Calibration, MeasuresAllThatAForecastAsksFor) {
  const CalibratedRun plain = run_of(small_config());
  CalibratedRun muon = plain;
  muon.options.optimizer = train::OptimizerChoice::kMuon;
  CalibratedRun offloaded = plain;
  offloaded.options.shard.offload.fraction = 1;
  CalibratedRun codes = plain;
  codes.options.shard.quantization.recipe = WeightRecipe::kFp8Row;
  const MixtralConfig experts{.decoder = small_config(), .num_local_experts = 4};
  train::CalibrationOptions options = few_steps({plain, muon, offloaded, codes, run_of(experts)});
  options.link_ranks = {2};
  options.progress = [](const std::string& line) { EXPECT_THAT(line, Not(HasSubstr("left out"))); };
  const Rates rates = parse_rates(rates_text(train::calibrate(options)), "rates");
  EXPECT_EQ(rates.device, "cpu");
  EXPECT_GT(rates.cores, 0);
  EXPECT_EQ(rates.parts.size(), 3);  // plain ones, codes, and experts
  const auto forecast = [&](const ModelConfig& model, const PlanOptions& plan) {
    const Planner planner(build_model("small", model), plan);
    return forecast_time(planner.model(), planner.groups(), planner.forecast(),
                         {.batch = {.rows = 2, .sequence = 16}}, {}, rates);
  };
  PlanOptions two{.ranks = 2, .compute = DType::kFloat32};
  const TimeForecast time = forecast(small_config(), two);
  EXPECT_EQ(time.source, CostSource::kMeasured);
  EXPECT_GT(time.step.compute, 0.0);
  EXPECT_GT(time.step.gather, 0.0);
  two.offload = 0.5;
  EXPECT_GT(forecast(small_config(), two).step.update, 0.0);
  two = {.ranks = 2, .compute = DType::kFloat32, .muon = DType::kFloat32};
  EXPECT_GT(forecast(small_config(), two).matrices_us, 0.0);
  two = {.ranks = 2, .compute = DType::kFloat32, .weights = WeightRecipe::kFp8Row};
  EXPECT_EQ(forecast(small_config(), two).source, CostSource::kMeasured);
  two = {.ranks = 2, .ep = 2, .compute = DType::kFloat32};
  EXPECT_GT(forecast(experts, two).step.exchange, 0.0);
}

TEST(Calibration, AddsToWhatIsKnownAndLosesOnlyWhatFails) {
  const Rates first = train::calibrate(few_steps({run_of(small_config())}));
  CalibratedRun longer = run_of(small_config());
  longer.sequence = 8;
  CalibratedRun unlike = run_of(small_config());
  std::get<LlamaConfig>(unlike.model.config).num_nextn_predict_layers = 1;
  CalibratedRun large = longer;
  large.rows = int64_t{1} << 50;  // more than any memory
  std::vector<std::string> lines;
  train::CalibrationOptions options = few_steps({unlike, large, longer});
  options.progress = [&](const std::string& line) { lines.push_back(line); };
  EXPECT_EQ(train::calibrate(options, first).parts.size(), 2);
  EXPECT_THAT(lines, Contains(HasSubstr("left out: the blocks of model 'small' are of several")));
  EXPECT_EQ(lines.size(), 5);
  Rates other = first;
  other.machine = "another machine";
  EXPECT_EQ(train::calibrate(few_steps({longer}), other).parts.size(), 1);
}

}  // namespace
}  // namespace fsdp::calibration_test
