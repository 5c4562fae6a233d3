// The time of a step from a table in which every work takes a microsecond: what is counted, what
// links take, and what is refused.
#include "fsdp/plan/time_forecast.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <numeric>
#include <optional>
#include <string>
#include <vector>

#include "fsdp/plan/load_model.h"
#include "fsdp/plan/model_tensors.h"
#include "fsdp/plan/update_work.h"
#include "support/config_examples.h"

namespace fsdp::time_forecast_test {
namespace {

using ::testing::HasSubstr;

constexpr int64_t kLayers = 3;
// Works of a block, of the embedding and of the head with its loss, as their layers call them.
constexpr double kForward = 13;
constexpr double kBackward = 19;
constexpr double kEnds = 1 + 2 + 5 + 3;

LlamaConfig small_config() {
  return {.vocab_size = 64,
          .hidden_size = 32,
          .num_hidden_layers = kLayers,
          .num_attention_heads = 4,
          .num_key_value_heads = 2,
          .intermediate_size = 48};
}

// Every size is below the one point of its axis, where a table stays the same.
RateTable even_rates(const std::string& device) {
  RateTable table{.machine = "a machine",
                  .host = {},
                  .date = "2026-11-18",
                  .torch = {},
                  .device = device,
                  .threads = 1,
                  .cores = 8};
  const auto add = [&](const std::string& work, size_t num_axes) {
    table.grids.push_back({.work = work,
                           .axes = std::vector<std::string>(num_axes, "size"),
                           .points = std::vector<std::vector<int64_t>>(num_axes, {1 << 30}),
                           .us = {1}});
  };
  const std::string type = device == "cpu" ? "fp32" : "bf16";
  for (const char* form : {" forward", " input gradient", " weight gradient"}) {
    add("product " + type + form, 3);
    add(std::string("product fp8-row") + form, 3);
  }
  for (const char* pass : {"codes of rows", "codes of rows and columns", "codes transposed",
                           "codes of weights fp8-row"})
    add(pass, 1);
  for (const std::string direction : {" forward", " backward"}) {
    add("attention " + type + direction, 4);
    for (const char* pass : {"norm", "sum and norm", "rotary", "gated silu"})
      add(pass + direction, 1);
  }
  for (const std::string direction : {" forward", " backward"}) {
    add("grouped product " + type + direction, 4);
    add("router" + direction, 3);
    add("dispatch" + direction, 2);
    add("combine" + direction, 2);
  }
  add("host step experts", 1);
  add("embedding forward", 1);
  add("host step", 1);
  add("host step muon", 1);
  add("embedding backward", 2);
  for (const char* work :
       {"sum", "sum of rows", "scaled to fp32", "cross entropy", "copy", "copy to fp32",
        "update fp32", "update split", "update separate", "offloaded update", "squared sum"})
    add(work, 1);
  return table;
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
  double host_us = 1;  // of a step
  WeightRecipe weights = WeightRecipe::kPlain;
  double offload = 0;
  std::optional<DType> muon = std::nullopt;
  double muon_host_us = 1;  // of a step
};

ModelConfig config_of(const Question& question) {
  if (question.experts == 0) return question.config;
  return MixtralConfig{.decoder = question.config, .num_local_experts = question.experts};
}

PlanOptions options_of(const Question& question) {
  PlanOptions options;
  options.ranks = question.ranks;
  options.ep = question.ep;
  options.tp = question.tp;
  options.precision.main_grads = DType::kFloat32;
  options.weights = question.weights;
  options.offload = question.offload;
  options.muon = question.muon;
  options.compute = question.device == "cpu" ? DType::kFloat32 : DType::kBFloat16;
  return options;
}

TimeForecast answer(const Question& question) {
  const Planner planner(build_model("small", config_of(question)), options_of(question));
  RateTable rates = even_rates(question.device);
  for (RateGrid& grid : rates.grids) {
    if (grid.work == "host step") grid.us = {question.host_us};
    if (grid.work == "host step muon") grid.us = {question.muon_host_us};
  }
  return forecast_time(planner.model(), planner.groups(), planner.forecast(), question.batch,
                       question.time, rates);
}

TEST(TimeForecast, CountsEveryWorkOfAStep) {
  const SimulatedStep step = answer({}).step;
  EXPECT_EQ(step.compute, kLayers * (kForward + kBackward) + kEnds);
  // An update and a pass for the norm of each unit's one group.
  constexpr double kUnits = kLayers + 2;
  EXPECT_EQ(step.update, 2 * kUnits);
  EXPECT_DOUBLE_EQ(step.us, step.compute + step.update);
}

TEST(TimeForecast, ComputesBlocksAgainAndMicrobatchesOneAfterTheOther) {
  Question question;
  question.batch.recomputes_blocks = true;
  question.time.microbatches = 2;
  EXPECT_EQ(answer(question).step.compute, 2 * (kLayers * (2 * kForward + kBackward) + kEnds));
}

TEST(TimeForecast, AddsGradientsOfSharedInputsOnACpu) {
  Question question;
  question.device = "cpu";
  constexpr double kSums = 3;  // of queries, keys and values; of gate and up
  EXPECT_EQ(answer(question).step.compute, kLayers * (kForward + kBackward + kSums) + kEnds);
}

TEST(TimeForecast, AddsBiases) {
  Question question;
  question.config.attention_bias = true;
  // A sum of rows for each of four, and gradients of the common input that products do not add.
  EXPECT_EQ(answer(question).step.compute, kLayers * (kForward + kBackward + 4 + 2) + kEnds);
}

TEST(TimeForecast, JoinsQuantisedGradientsOfSharedInputs) {
  Question question;
  question.weights = WeightRecipe::kFp8Row;
  // Codes of four inputs, which the backward transposes; both codes of seven gradients, and seven
  // weights transposed; a product for the gradient of each input in place of one for each weight.
  EXPECT_EQ(answer(question).step.compute,
            kLayers * (kForward + 4 + kBackward + 4 + 2 * 7 + 4 - 7) + kEnds);
}

// Without a gated MLP of four works forward and seven backward.
constexpr double kForwardToExperts = kForward - 4;
constexpr double kBackwardToExperts = kBackward - 7;

TEST(TimeForecast, CountsTheWorkOfExperts) {
  Question question;
  question.experts = 4;
  // Router, both ways of rows, two grouped products and what is between them; in the backward also
  // gradients of weights that go to their slabs.
  EXPECT_EQ(answer(question).step.compute,
            kLayers * (kForwardToExperts + 6 + kBackwardToExperts + 7) + kEnds);
  question.device = "cpu";
  constexpr double kSums = 2;  // of queries, keys and values
  EXPECT_EQ(answer(question).step.compute,
            kLayers * (kForwardToExperts + 6 + kBackwardToExperts + kSums + 6) + kEnds);
}

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
  constexpr double kBytes = 32.0 * 32 * 2 / 2;
  EXPECT_DOUBLE_EQ(time.step.exchange, (kLayers * 2 * (2 + 3) + 2 + 2) * kBytes);
  // Ranks of one group have the same tokens.
  EXPECT_DOUBLE_EQ(time.tokens_per_s, 2 * 16 / (time.step.us * 1e-6));
  question.config.vocab_size = 63;  // cannot be shared: each has its own tokens, and all words
  EXPECT_DOUBLE_EQ(answer(question).step.exchange, kLayers * 2 * (2 + 3) * kBytes);
}

TEST(TimeForecast, MultipliesPartsOfMatricesInATensorGroup) {
  const auto compute_with = [](int64_t tp) {
    RateTable rates = even_rates("cuda");
    // In proportion to each size.
    for (RateGrid& grid : rates.grids)
      for (std::vector<int64_t>& axis : grid.points) axis = {1};
    Question question;
    question.ranks = question.tp = tp;
    question.time.inner_link = LinkSpeed{.bytes_per_s = 1e9};
    const Planner planner(build_model("small", config_of(question)), options_of(question));
    return forecast_time(planner.model(), planner.groups(), planner.forecast(), question.batch,
                         question.time, rates)
        .step.compute;
  };
  // Zeros of the embedding's rows are a pass more over all tokens, there and back.
  EXPECT_NEAR(compute_with(2), compute_with(1) / 2, 0.01 * compute_with(1));
}

TEST(TimeForecast, MakesCodesOfWeightsAfterTheirUpdate) {
  Question question;
  question.weights = WeightRecipe::kFp8Row;
  // Blocks have two groups, one of them of seven matrices.
  constexpr double kGroups = 2 * kLayers + 2;
  EXPECT_DOUBLE_EQ(answer(question).step.update, 2 * kGroups + 7 * kLayers);
  // Of four ranks each has a quarter, with a little padding, and all that is below the one point
  // takes as long.
  question.ranks = 4;
  question.time.inner_link = LinkSpeed{.bytes_per_s = 1e9};
  EXPECT_NEAR(answer(question).step.update, kGroups + 7 * kLayers / 4.0, 1.0);
}

TEST(TimeForecast, UpdatesOnTheHostWhatIsOffloaded) {
  Question question;
  question.offload = 0.5;
  constexpr double kUnits = kLayers + 2;
  EXPECT_DOUBLE_EQ(answer(question).step.update, 3 * kUnits);
  question.offload = 1.0;
  EXPECT_DOUBLE_EQ(answer(question).step.update, 2 * kUnits);
}

// Three products and two diagonals, five times; a pass for zeros, for the norm, and for the
// quotient; and the momentum and the weights, of whose 16 and 10 bytes an element the measured
// update has 28.
constexpr double kMatrix = 5 * (3 + 2) + 3 + (16.0 + 10.0) / 28.0;

TEST(TimeForecast, MultipliesMatricesOfMuon) {
  Question question;
  question.muon = DType::kBFloat16;
  // Everything else is AdamW's: a group of the embedding, of each block's norms, and of the head.
  constexpr double kOthers = kLayers + 2;
  constexpr double kNorms = 2 * kLayers + 2;
  EXPECT_DOUBLE_EQ(answer(question).step.update, 7 * kLayers * kMatrix + kOthers + kNorms);
}

TEST(TimeForecast, WaitsForTheBusiestOwnerOfMatrices) {
  Question question;
  question.muon = DType::kBFloat16;
  for (const int64_t ranks : {1, 3, 40}) {
    question.ranks = ranks;
    const Planner planner(build_model("small", config_of(question)), options_of(question));
    const MatrixTimes times =
        matrix_times(planner.groups(), planner.forecast().options, kLayers + 2, even_rates("cuda"));
    constexpr double kMatrices = 7 * kLayers;
    EXPECT_DOUBLE_EQ(std::accumulate(times.units.begin(), times.units.end(), 0.0),
                     times.most_of_a_rank * kMatrices * kMatrix);
    EXPECT_GE(times.most_of_a_rank, 1.0 / static_cast<double>(ranks));
    EXPECT_LE(times.most_of_a_rank, ranks == 1 ? 1.0 : 0.6);
    EXPECT_EQ(times.units.front(), 0.0);
  }
}

TEST(TimeForecast, WaitsForTheHostThatAsksForMatrices) {
  Question question;
  question.muon = DType::kBFloat16;
  question.muon_host_us = 5000;
  EXPECT_GE(answer(question).step.us, 4999.0);
  question.time.is_recorded = true;
  EXPECT_LT(answer(question).step.us, 2000.0);
}

TEST(TimeForecast, WaitsForTheHostUnlessTheStepIsRecorded) {
  Question question;
  question.host_us = 3000;
  EXPECT_GE(answer(question).step.us, 3000.0);
  question.time.is_recorded = true;
  EXPECT_EQ(answer(question).step.us, answer({}).step.us);
}

TEST(TimeForecast, TakesLinksAsGiven) {
  Question question;
  question.ranks = 4;
  question.time.inner_link = LinkSpeed{.bytes_per_s = 1e6, .latency_us = 5};
  PlanOptions options{.ranks = 4};
  options.precision.main_grads = DType::kFloat32;
  const Planner planner(build_model("small", question.config), options);
  const Traffic traffic = planner.forecast().traffic;
  const SimulatedStep step = answer(question).step;
  // A byte takes a microsecond. Units are gathered twice but for the last, and reduced once.
  constexpr double kUnits = kLayers + 2;
  EXPECT_DOUBLE_EQ(step.gather,
                   static_cast<double>(traffic.inner.all_gather) + 5 * (2 * kUnits - 1));
  EXPECT_DOUBLE_EQ(step.reduce, static_cast<double>(traffic.inner.reduce_scatter) + 5 * kUnits);
  EXPECT_GT(step.exposed_gather, 0.0);
}

TEST(TimeForecast, CountsTokensOfAllRanks) {
  Question question;
  question.ranks = 4;
  question.time = {.microbatches = 3, .inner_link = LinkSpeed{.bytes_per_s = 1e9}};
  const TimeForecast time = answer(question);
  EXPECT_DOUBLE_EQ(time.tokens_per_s, 4 * 3 * 2 * 16 / (time.step.us * 1e-6));
}

TEST(TimeForecast, RefusesWhatItDoesNotKnow) {
  Question apart;
  apart.ranks = 2;
  EXPECT_THAT(testing::refusal([&] { answer(apart); }),
              HasSubstr("the rates of a machine have no link between ranks; give the bytes per "
                        "second that a rank receives, e.g. --link 300GB"));
  Question window;
  window.config.sliding_window = 4;
  EXPECT_THAT(testing::refusal([&] { answer(window); }),
              HasSubstr("the time of model 'small' is not known; it is for the Llama family"));
  Question codes;
  codes.experts = 4;
  codes.weights = WeightRecipe::kFp8Row;
  EXPECT_THAT(testing::refusal([&] { answer(codes); }), HasSubstr("without quantised experts"));
}

}  // namespace
}  // namespace fsdp::time_forecast_test
