// The time of a step by given rates: measured parts, rooflines, updates and links.
#include "fsdp/plan/time_forecast.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <optional>
#include <string>

#include "fsdp/plan/flops.h"
#include "fsdp/plan/group_plan.h"
#include "fsdp/plan/load_model.h"
#include "fsdp/plan/model_tensors.h"
#include "support/config_examples.h"

namespace fsdp::time_forecast_test {
namespace {

using ::testing::HasSubstr;

constexpr int64_t kLayers = 3;
constexpr int64_t kUnits = kLayers + 2;
constexpr double kTokens = 2 * 16;

LlamaConfig small_config() {
  return {.vocab_size = 64,
          .hidden_size = 32,
          .num_hidden_layers = kLayers,
          .num_attention_heads = 4,
          .num_key_value_heads = 2,
          .intermediate_size = 48};
}

struct Question {
  std::string device = "cuda";
  int64_t ranks = 1;
  PeakOptions batch = {.batch = {.rows = 2, .sequence = 16}};
  TimeOptions time = {};
  LlamaConfig config = small_config();
  int64_t experts = 0;
  int64_t ep = 1;
  int64_t tp = 1;
  WeightRecipe weights = WeightRecipe::kPlain;
  double offload = 0;
  std::optional<DType> muon = std::nullopt;

  ModelConfig model() const {
    if (experts == 0) return config;
    return MixtralConfig{.decoder = config, .num_local_experts = experts};
  }
};

// Parts in whole microseconds; a byte of memory takes one, too.
Rates rates_of(const Question& question) {
  Rates rates{.machine = "a machine",
              .host = {},
              .date = "2026-11-18",
              .torch = "2.13.0",
              .device = question.device,
              .threads = 1,
              .cores = 8,
              .flops_per_s = {{"bf16", 1e9}, {"fp32", 1e9}, {"fp8-row", 2e9}, {"muon bf16", 1e6}},
              .bytes_per_s = 1e6,
              .offload_bytes_per_s = 1e5};
  rates.parts.push_back({.shape = shape_text(question.model()),
                         .products = question.device == "cpu" ? "fp32" : "bf16",
                         .rows = 2,
                         .sequence = 16,
                         .embedding = {1, 2},
                         .block = {10, 20},
                         .head = {5, 3}});
  return rates;
}

constexpr double kEnds = 1 + 2 + 5 + 3;

Planner planner_of(const Question& question) {
  PlanOptions options;
  options.ranks = question.ranks;
  options.ep = question.ep;
  options.tp = question.tp;
  options.precision.main_grads = DType::kFloat32;
  options.weights = question.weights;
  options.offload = question.offload;
  options.muon = question.muon;
  options.compute = question.device == "cpu" ? DType::kFloat32 : DType::kBFloat16;
  return {build_model("small", question.model()), options};
}

TimeForecast answer(const Question& question, const Rates& rates) {
  const Planner planner = planner_of(question);
  return forecast_time(planner.model(), planner.groups(), planner.forecast(), question.batch,
                       question.time, rates);
}

TimeForecast answer(const Question& question) { return answer(question, rates_of(question)); }

// Elements of all groups with their padding; or of those alone that are quantised.
double elements(const Question& question, bool (GroupTypes::*which)() const = nullptr) {
  const Planner planner = planner_of(question);
  double sum = 0;
  for (const GroupPlan& group : planner.groups())
    if (which == nullptr || (group.types.*which)())
      sum += static_cast<double>(group.layout.padded_numel());
  return sum;
}

// The time of one block.
double block_us(Question question, const Rates& rates) {
  question.config.num_hidden_layers = 1;
  const double one = answer(question, rates).step.compute;
  question.config.num_hidden_layers = 2;
  return answer(question, rates).step.compute - one;
}

// --- computing -----------------------------------------------------------------------------------

TEST(TimeForecast, AddsTheMeasuredPartsOfAModel) {
  const TimeForecast time = answer({});
  EXPECT_EQ(time.source, CostSource::kMeasured);
  EXPECT_DOUBLE_EQ(time.step.compute, kLayers * 30 + kEnds);
  // Each element takes 28 bytes for the update, and 4 for the norm.
  EXPECT_DOUBLE_EQ(time.step.update, 32 * elements({}));
  EXPECT_DOUBLE_EQ(time.step.us, time.step.compute + time.step.update);
  Question deeper;
  deeper.config.num_hidden_layers = 7;  // of the same blocks
  EXPECT_DOUBLE_EQ(answer(deeper).step.compute, 7 * 30 + kEnds);
}

TEST(TimeForecast, ComputesBlocksAgainAndMicrobatchesOneAfterTheOther) {
  Question question;
  question.batch.recomputes_blocks = true;
  question.time.microbatches = 2;
  EXPECT_DOUBLE_EQ(answer(question).step.compute, 2 * (kLayers * 40 + kEnds));
}

TEST(TimeForecast, ScalesPartsOfAnotherBatchByItsRoofline) {
  Rates rates = rates_of({});
  rates.bytes_per_s = 1e30;  // products alone
  Question question;
  question.batch.batch.rows = 6;
  const TimeForecast time = answer(question, rates);
  EXPECT_EQ(time.source, CostSource::kScaled);
  EXPECT_EQ(time.measured.rows, 2);
  EXPECT_NEAR(block_us(question, rates), 3 * 30, 1e-6);
  rates.parts.push_back(rates.parts.front());
  rates.parts.back().rows = 5;  // nearer
  EXPECT_EQ(answer(question, rates).measured.rows, 5);
  // Ranks of a tp group share a block's products.
  question.batch.batch.rows = 2;
  question.ranks = question.tp = 2;
  question.time.inner_link = LinkSpeed{.bytes_per_s = 1e9};
  EXPECT_NEAR(block_us(question, rates), 15, 1e-6);
}

TEST(TimeForecast, IsARooflineWhereNothingWasMeasured) {
  const auto compute_us = [](const ModelConfig& config) {
    const Planner planner(build_model("other", config), {});
    Rates rates = rates_of({});
    rates.parts.clear();
    rates.bytes_per_s = 1e30;
    const TimeForecast time = forecast_time(planner.model(), planner.groups(), planner.forecast(),
                                            Question{}.batch, {}, rates);
    EXPECT_EQ(time.source, CostSource::kRoofline);
    return time.step.compute;
  };
  LlamaConfig narrow = small_config();
  LlamaConfig biased = small_config();
  biased.attention_bias = true;
  EXPECT_EQ(compute_us(narrow), compute_us(biased));
  // A thousand operations take a microsecond; those of attention count more.
  for (const char* name : {"llama-1b", "mixtral-8x7b", "nemotron-h-8b"}) {
    const ModelConfig config = *load_model(name).layers;
    const double of_products = flops_per_token(config, 16) * kTokens / 1e3;
    EXPECT_GE(compute_us(config), 0.999 * of_products) << name;
    EXPECT_LE(compute_us(config), 1.25 * of_products) << name;
  }
  Rates slower = rates_of({});
  slower.parts.clear();
  const double with_passes = answer({}, slower).step.compute;
  EXPECT_GT(with_passes, compute_us(narrow));
  slower.bytes_per_s /= 2;
  EXPECT_GT(answer({}, slower).step.compute, with_passes);
}

// --- exchanges -----------------------------------------------------------------------------------

TEST(TimeForecast, SendsTokensToTheRanksOfTheirExperts) {
  Question question;
  question.experts = 4;
  question.ranks = question.ep = 2;
  question.time.inner_link = LinkSpeed{.bytes_per_s = 1e6};  // a byte takes a microsecond
  // Each of 32 tokens may choose two experts of one rank: room for two rows of 32 numbers of two
  // bytes on each of two ranks, half of which travel; four times in a step.
  constexpr double kBytes = 32.0 * 2 * 2 * 32 * 2 / 2;
  EXPECT_DOUBLE_EQ(answer(question).step.exchange, kLayers * 4 * kBytes);
  // A host knows how many rows there are, which in fp32 are as many bytes.
  question.device = "cpu";
  EXPECT_DOUBLE_EQ(answer(question).step.exchange, kLayers * 4 * kBytes);
  question.batch.recomputes_blocks = true;
  EXPECT_DOUBLE_EQ(answer(question).step.exchange, kLayers * 6 * kBytes);
}

TEST(TimeForecast, GathersTokensOfATensorGroup) {
  Question question;
  question.ranks = question.tp = 2;
  question.time.inner_link = LinkSpeed{.bytes_per_s = 1e6};
  const TimeForecast time = answer(question);
  // Halves of 32 tokens of 32 numbers of two bytes: in a block there are two of them forward at
  // each of two layers that are cut, and three and one backward; two at each end of the model.
  constexpr double kBytes = kTokens * 32 * 2 / 2;
  EXPECT_DOUBLE_EQ(time.step.exchange, (kLayers * 2 * (2 + 3) + 2 + 2) * kBytes);
  // Ranks of one group have the same tokens.
  EXPECT_DOUBLE_EQ(time.tokens_per_s, kTokens / (time.step.us * 1e-6));
  question.config.vocab_size = 63;  // cannot be shared: each has its own tokens, and all words
  EXPECT_DOUBLE_EQ(answer(question).step.exchange, kLayers * 2 * (2 + 3) * kBytes);
}

// --- updates -------------------------------------------------------------------------------------

TEST(TimeForecast, MakesCodesOfWeightsAfterTheirUpdate) {
  Question question;
  question.weights = WeightRecipe::kFp8Row;
  EXPECT_DOUBLE_EQ(answer(question).step.update,
                   32 * elements(question) + 14 * elements(question, &GroupTypes::is_quantized));
}

TEST(TimeForecast, UpdatesOnTheHostWhatIsOffloaded) {
  Question question;
  question.offload = 0.5;
  const double each = elements(question);
  // The host is ten times slower, and has 30 bytes for each: its weights are not split.
  EXPECT_NEAR(answer(question).step.update, (4 + 14 + 150) * each, 1e-6 * each);
  question.offload = 1.0;
  EXPECT_NEAR(answer(question).step.update, (4 + 300) * each, 1e-6 * each);
  Rates rates = rates_of(question);
  rates.offload_bytes_per_s = 0;
  EXPECT_THAT(testing::refusal([&] { answer(question, rates); }),
              HasSubstr("the rates of a machine have no updates of offloaded state; "));
}

TEST(TimeForecast, WaitsForTheBusiestOwnerOfMatrices) {
  Question question;
  question.muon = DType::kBFloat16;
  question.time.inner_link = LinkSpeed{.bytes_per_s = 1e9};
  for (const int64_t ranks : {1, 3, 40}) {
    question.ranks = ranks;
    const TimeForecast time = answer(question);
    // Five iterations; an operation takes a microsecond.
    EXPECT_NEAR(time.matrices_us, 5 * planner_of(question).forecast().matrices.most_flops, 1e-3);
    EXPECT_GT(time.step.update, time.matrices_us);
  }
}

// --- the host, links, ranks ----------------------------------------------------------------------

TEST(TimeForecast, WaitsForTheHostUnlessTheStepIsRecorded) {
  Question question;
  Rates rates = rates_of(question);
  const double alone = answer(question, rates).step.us;
  rates.parts[0].host_us = 1e6;
  EXPECT_GE(answer(question, rates).step.us, kLayers * 1e6);
  rates.parts[0].host_us = 0;
  rates.host_us_per_tensor = 1e5;  // nine of a block
  EXPECT_GE(answer(question, rates).step.us, kLayers * 9e5);
  question.time.is_recorded = true;
  EXPECT_EQ(answer(question, rates).step.us, alone);
  question = {};
  question.muon = DType::kBFloat16;
  rates.host_us_per_tensor = 0;
  rates.host_us_per_matrix = 1e7;
  EXPECT_GE(answer(question, rates).step.us, 7 * kLayers * 1e7);
}

TEST(TimeForecast, TakesLinksAsGivenOrMeasured) {
  Question question;
  question.ranks = 4;
  question.time.inner_link = LinkSpeed{.bytes_per_s = 1e6, .latency_us = 5};
  const Traffic traffic = planner_of(question).forecast().traffic;
  const SimulatedStep step = answer(question).step;
  // A byte takes a microsecond. Units are gathered twice but for the last, and reduced once.
  EXPECT_DOUBLE_EQ(step.gather,
                   static_cast<double>(traffic.inner.all_gather) + 5 * (2 * kUnits - 1));
  EXPECT_DOUBLE_EQ(step.reduce, static_cast<double>(traffic.inner.reduce_scatter) + 5 * kUnits);
  EXPECT_GT(step.exposed_gather, 0.0);
  // Measured ones of the most ranks up to four; faster links than these make nothing faster.
  Rates rates = rates_of(question);
  for (const auto& [ranks, speed] : {std::pair(2, 2e6), {4, 1e6}, {8, 4e6}})
    for (const char* collective : {"all_gather", "reduce_scatter"})
      rates.links.push_back({collective, ranks, {.bytes_per_s = speed, .latency_us = 5}});
  question.time.inner_link.reset();
  EXPECT_DOUBLE_EQ(answer(question, rates).step.gather, step.gather);
  question.time.inner_link = LinkSpeed{.bytes_per_s = 1e9};
  EXPECT_DOUBLE_EQ(answer(question, rates).step.gather, step.gather);
}

TEST(TimeForecast, CountsTokensOfAllRanksAndLetsThemShareCores) {
  Question question;
  question.ranks = 4;
  question.time = {.microbatches = 3, .inner_link = LinkSpeed{.bytes_per_s = 1e9}};
  const TimeForecast time = answer(question);
  EXPECT_DOUBLE_EQ(time.tokens_per_s, 4 * 3 * kTokens / (time.step.us * 1e-6));
  question.time.microbatches = 1;
  question.device = "cpu";  // of eight cores
  question.ranks = 16;
  EXPECT_DOUBLE_EQ(answer(question).step.compute, 2 * (kLayers * 30 + kEnds));
}

TEST(TimeForecast, BoundsWhatCollectivesTakeFromKernels) {
  Question question;
  EXPECT_EQ(answer(question).slow_us, 0);  // there are none
  question.ranks = 4;
  const auto slowed = [&](double bytes_per_s) {
    question.time.inner_link = LinkSpeed{.bytes_per_s = bytes_per_s};
    const TimeForecast time = answer(question);
    return (time.slow_us - time.step.us) / time.step.compute;
  };
  // Hidden or not, a microsecond of theirs leaves a kernel 1 / 1.7 of its work.
  const Traffic moved = planner_of(question).forecast().traffic;
  const auto bytes = static_cast<double>(moved.inner.all_gather + moved.inner.reduce_scatter);
  question.time.inner_link = LinkSpeed{.bytes_per_s = 1e9};
  const double compute = answer(question).step.compute;
  EXPECT_LE(slowed(1e9), 0.7 / 1.7 * bytes / 1e3 / compute + 1e-9);
  EXPECT_GT(slowed(1e9), 0.0);
  EXPECT_LE(slowed(1e6), 0.7 + 1e-9);
  question.device = "cpu";
  EXPECT_EQ(answer(question).slow_us, 0);
}

TEST(TimeForecast, RefusesWhatItDoesNotKnow) {
  Question apart;
  apart.ranks = 2;
  EXPECT_THAT(testing::refusal([&] { answer(apart); }),
              HasSubstr("the rates of a machine have no link between ranks; give the bytes per "
                        "second that a rank receives, e.g. --link 300GB"));
  const Planner list(parse_model(R"({"name": "mine", "units": [{"name": "a",
      "tensors": [{"name": "w", "shape": [4, 4]}]}]})",
                                 "mine.json"),
                     {});
  EXPECT_THAT(testing::refusal([&] {
                forecast_time(list.model(), list.groups(), list.forecast(), Question{}.batch, {},
                              rates_of({}));
              }),
              HasSubstr("the time of model 'mine' is not known: a list of shapes"));
}

}  // namespace
}  // namespace fsdp::time_forecast_test
