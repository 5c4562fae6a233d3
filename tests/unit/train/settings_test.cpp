// Flags, config files and the table at the start come from one table.
#include "fsdp/train/settings/settings.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <set>

#include "fsdp/base/error.h"
#include "fsdp/base/foreign_words.h"
#include "support/error_of.h"

namespace fsdp::train::settings_test {
namespace {

using testing::error_of;
using ::testing::HasSubstr;

TrainOptions given(const GivenValues& values) {
  TrainOptions options;
  apply_given(options, values);
  return options;
}

// Values that are not the defaults, for every setting.
const GivenValues kChangedValues = {
    {"model", {"llama-1b"}},
    {"init", {"weights"}},
    {"from-scratch", {"true"}},
    {"vocabulary", {"4096"}},
    {"compute", {"bf16"}},
    {"weights", {"fp8-block"}},
    {"weights-except", {"*.0.*", "*.k_proj.*"}},
    {"weights-scaling", {"delayed"}},
    {"weights-gradient", {"plain"}},
    {"recompute", {"block"}},
    {"logit-memory", {"33554432"}},
    {"data", {"a", "b c"}},
    {"data-weights", {"0.75", "2"}},
    {"tokenizer", {"bytes"}},
    {"field", {"body"}},
    {"validation-data", {"v"}},
    {"validation-fraction", {"0.125"}},
    {"documents", {"separate"}},
    {"sequence", {"64"}},
    {"batch", {"24"}},
    {"microbatches", {"3"}},
    {"validate-every", {"7"}},
    {"validation-batches", {"9"}},
    {"steps", {"77"}},
    {"tokens", {"123456789012"}},
    {"epochs", {"1.5"}},
    {"optimizer", {"sgd"}},
    {"lr", {"0.1"}},
    {"schedule", {"wsd"}},
    {"warmup", {"5"}},
    {"min-lr", {"1e-05"}},
    {"decay-steps", {"10"}},
    {"decay", {"1-sqrt"}},
    {"beta1", {"0.8"}},
    {"beta2", {"0.7"}},
    {"eps", {"1e-06"}},
    {"weight-decay", {"0.3"}},
    {"decay-vectors", {"true"}},
    {"rule", {"*.bias decay=0", "embed.* decay=0.5 rate=0.25", "head rate=2"}},
    {"momentum", {"0.5"}},
    {"nesterov", {"true"}},
    {"muon-momentum", {"0.9"}},
    {"muon-scale", {"original"}},
    {"muon-except", {"*.o_proj.*"}},
    {"adamw-rate", {"0.5"}},
    {"clip", {"0.5"}},
    {"on-nonfinite", {"update"}},
    {"loss-scale", {"dynamic:1024"}},
    {"updates", {"blocking"}},
    {"rounding", {"stochastic"}},
    {"ranks", {"4"}},
    {"outer", {"2"}},
    {"ep", {"4"}},
    {"tp", {"2"}},
    {"expert-capacity", {"1.5"}},
    {"strategy", {"optim+hfsdp"}},
    {"main-params", {"none"}},
    {"main-storage", {"separate"}},
    {"main-grads", {"fp32"}},
    {"grad-comm", {"bf16"}},
    {"moments", {"as below"}},
    {"first-moment", {"fp8_e4m3"}},
    {"second-moment", {"bf16"}},
    {"pool", {"on_demand"}},
    {"prefetch", {"3"}},
    {"pool-budget", {"4294967296"}},
    {"on-move", {"refuse"}},
    {"other-units", {"persistent"}},
    {"user-buffers", {"symmetric"}},
    {"gradient-lifetime", {"step"}},
    {"granularity", {"block(128)"}},
    {"offload", {"0.5"}},
    {"offload-pin", {"false"}},
    {"offload-overlap", {"false"}},
    {"offload-chunk", {"4096"}},
    {"device", {"cpu"}},
    {"cuda-graph", {"true"}},
    {"threads", {"2"}},
    {"checked", {"true"}},
    {"name-nan", {"true"}},
    {"timeout", {"12.5"}},
    {"seed", {"9223372036854775807"}},
    {"deterministic", {"true"}},
    {"checkpoint-dir", {"runs/x"}},
    {"checkpoint-every", {"13"}},
    {"keep-last", {"5"}},
    {"keep-every", {"1000"}},
    {"save", {"blocking"}},
    {"checkpoint-dtype", {"bf16"}},
    {"write-chunk", {"1048576"}},
    {"load-chunk", {"2097152"}},
    {"read-threads", {"4"}},
    {"resume", {"never"}},
    {"restart-data", {"true"}},
    {"allow-missing", {"*.bias"}},
    {"allow-extra", {"true"}},
    {"export-dir", {"weights"}},
    {"export-every", {"17"}},
    {"patches", {"patches"}},
    {"patch-every", {"4"}},
    {"patch-names", {"vllm"}},
    {"keep-patches", {"5"}},
    {"log", {"log"}},
    {"tensorboard", {"tb"}},
    {"report", {"none"}},
    {"trace", {"trace.json"}},
    {"trace-steps", {"2-9"}},
    {"log-every", {"11"}},
    {"sample", {"Once \"upon\""}},
    {"sample-tokens", {"12"}},
    {"peak-tflops", {"989.4"}},
    {"quiet", {"true"}}};

TEST(Settings, EverySettingIsReadBackAsItWasGiven) {
  const TrainOptions options = given(kChangedValues);
  const TrainOptions defaults;
  for (const Setting& setting : settings()) {
    ASSERT_TRUE(kChangedValues.contains(setting.name)) << setting.name << " is not tested";
    EXPECT_EQ(setting.read(options), kChangedValues.at(setting.name)) << setting.name;
    EXPECT_NE(setting.read(options), setting.read(defaults)) << setting.name;
  }
}

TEST(Settings, NamesAreUnique) {
  std::set<std::string> names;
  for (const Setting& setting : settings()) EXPECT_TRUE(names.insert(setting.name).second);
}

TEST(Settings, APrintedConfigReadsBackToTheSameOptions) {
  for (const TrainOptions& options : {TrainOptions{}, given(kChangedValues)}) {
    TrainOptions again = given({{"steps", {"1"}}});
    apply_config(again, config_text(options), "printed");
    EXPECT_EQ(config_text(again), config_text(options));
  }
}

TEST(Settings, NumbersAndFlagsAreNumbersAndFlagsInAConfig) {
  const auto document = nlohmann::json::parse(config_text(given(kChangedValues)));
  EXPECT_TRUE(document["steps"].is_number_integer());
  EXPECT_TRUE(document["lr"].is_number_float());
  EXPECT_TRUE(document["nesterov"].is_boolean());
  EXPECT_EQ(document["data"], nlohmann::json({"a", "b c"}));
  EXPECT_EQ(document["seed"], std::numeric_limits<int64_t>::max());
}

TEST(Settings, OnlyWhatDiffersFromTheDefaultIsMarked) {
  TrainOptions options = given({{"steps", {"12"}}, {"batch", {"8"}}});
  for (const SettingRow& shown : shown_settings(options, options))
    EXPECT_EQ(shown.is_changed, shown.name == "steps") << shown.name;
}

TEST(Settings, WhatIsLeftToBeChosenIsShownAsItWasChosen) {
  const TrainOptions options = given({{"steps", {"200"}}, {"checkpoint-dir", {"d"}}});
  const TrainOptions resolved = options.resolved(
      4, {.device = DeviceChoice::kCuda, .compute = DType::kBFloat16, .peak_tflops = 312});
  std::map<std::string, SettingRow> shown;
  for (const SettingRow& row : shown_settings(options, resolved)) shown[row.name] = row;
  EXPECT_EQ(shown["warmup"].value, "20");
  EXPECT_EQ(shown["min-lr"].value, "4e-04");
  EXPECT_EQ(shown["compute"].value, "bf16");
  EXPECT_EQ(shown["device"].value, "cuda");
  EXPECT_EQ(shown["ranks"].value, "4");
  EXPECT_EQ(shown["log"].value, "d/log.jsonl");
  EXPECT_EQ(shown["peak-tflops"].value, "312");
  for (const char* name : {"warmup", "min-lr", "compute", "device", "ranks", "log", "peak-tflops"})
    EXPECT_FALSE(shown[name].is_changed) << name;
}

TEST(Settings, AGivenPeakWinsOverThatOfTheDevice) {
  const RankDevice found{.device = DeviceChoice::kCuda, .peak_tflops = 312};
  EXPECT_EQ(given({{"peak-tflops", {"100"}}}).resolved(1, found).peak_tflops, 100);
  EXPECT_EQ(given({{"peak-tflops", {"0"}}}).resolved(1, found).peak_tflops, 0);
}

TEST(Settings, AFlagForBothMomentsComesBeforeThoseForOne) {
  const TrainOptions options = given({{"second-moment", {"fp32"}}, {"moments", {"bf16"}}});
  EXPECT_EQ(options.precision.first_moment, DType::kBFloat16);
  EXPECT_EQ(options.precision.second_moment, DType::kFloat32);
}

TEST(Settings, AnUnknownKeyIsAnsweredWithTheNearest) {
  TrainOptions options;
  EXPECT_EQ(error_of<UsageError>([&] { apply_config(options, R"({"step": 1})", "c.json"); }),
            "c.json: 'step' is no setting; did you mean 'steps'? fsdp train --print-config lists "
            "them all");
  EXPECT_THAT(error_of<UsageError>([&] { apply_config(options, R"({"zzzzzzzz": 1})", "c.json"); }),
              HasSubstr("--print-config"));
}

// What the table of other programs' words calls them: a setting, or a value of one.
TEST(Settings, HintsNameWhatThereIs) {
  std::set<std::string> known = {"check", "epochs",
                                 "pool-budget-bytes"};  // of others than settings
  for (const Setting& setting : settings()) known.insert(setting.name);
  for (const Strategy& strategy : named_strategies()) known.insert(std::string(strategy.name));
  for (const DType dtype : all_dtypes()) known.insert(std::string(name_of(dtype)));
  known.insert({"adamw", "cosine", "constant", "cuda", "block"});
  for (const ForeignWord& row : foreign_words()) {
    EXPECT_TRUE(known.contains(std::string(row.name))) << row.word << ": " << row.name;
    if (row.value.empty()) continue;
    TrainOptions options;
    apply_given(options, {{std::string(row.name), {std::string(row.value)}}});
  }
}

TEST(Settings, AConfigErrorNamesFileKeyAndValue) {
  TrainOptions options;
  const auto error = [&](const char* text) {
    return error_of<UsageError>([&] { apply_config(options, text, "c.json"); });
  };
  EXPECT_THAT(error(R"({"steps": "many"})"), HasSubstr("c.json: steps is 'many'; it must be"));
  EXPECT_THAT(error(R"({"steps": 1.5})"), HasSubstr("c.json: steps is '1.5'; it must be"));
  EXPECT_THAT(error(R"({"steps": [1]})"), HasSubstr("it must be a single value"));
  EXPECT_THAT(error(R"({"steps": {"a": 1}})"), HasSubstr("a number, a text or a flag"));
  EXPECT_THAT(error(R"({"quiet": "yes"})"), HasSubstr("c.json: quiet is 'yes'; use one of"));
  EXPECT_THAT(error(R"([1])"), HasSubstr("one JSON object"));
  EXPECT_THAT(error(R"({"steps": 1, "steps": 2})"), HasSubstr("c.json: "));
  EXPECT_THAT(error("{"), HasSubstr("c.json: "));
}

TEST(TrainOptions, ABatchThatRanksCannotShareIsAnsweredWithOneThatTheyCan) {
  TrainOptions options = given({{"data", {"x"}}, {"batch", {"10"}}, {"microbatches", {"2"}}});
  EXPECT_EQ(error_of<UsageError>([&] { options.validate(4); }),
            "--batch is 10, which 4 ranks with 2 microbatches cannot share evenly; give a "
            "multiple of 8, e.g. 16");
}

TEST(TrainOptions, TokensCountInStepsThatAreWhole) {
  const TrainOptions options = given({{"batch", {"4"}}, {"sequence", {"10"}}, {"tokens", {"101"}}});
  EXPECT_EQ(options.total_steps(), 3);
}

}  // namespace
}  // namespace fsdp::train::settings_test
