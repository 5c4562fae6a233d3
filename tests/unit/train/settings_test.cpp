// Flags, config files and the table at the start come from one table.
#include "fsdp/train/settings/settings.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <set>

#include "fsdp/base/error.h"
#include "fsdp/base/foreign_words.h"
#include "fsdp/train/run_plan.h"
#include "support/error_of.h"

namespace fsdp::train::settings_test {
namespace {

using testing::error_of;
using Json = nlohmann::json;
using ::testing::HasSubstr;

TrainOptions given(const GivenValues& values) {
  TrainOptions options;
  apply_given(options, values);
  return options;
}

// A config file whose values are not the defaults, for every setting.
constexpr const char* kChanged = R"json({
  "model": "llama-1b", "init": "weights", "vocabulary": "4096", "compute": "bf16",
  "weights": "fp8-block", "weights_except": ["*.0.*", "*.k_proj.*"], "weights_gradient": "plain",
  "recompute": "block", "logit_memory": "33554432",
  "lora": 8, "lora_alpha": "32", "lora_on": ["*.q_proj", "*.v_proj"],
  "data": ["a", "b c"], "data_weights": ["0.75", "2"], "tokenizer": "bytes", "field": "body",
  "validation_data": ["v"], "validation_fraction": 0.125, "documents": "separate",
  "sequence": "64", 
  "batch": 24, "microbatches": 3, "validate_every": "7", "validation_batches": 9,
  "steps": 77, "tokens": 123456789012, "epochs": 1.5,
  "optimizer": "sgd", "lr": "0.1", "schedule": "wsd", "warmup": "5", "min_lr": "1e-05",
  "decay_steps": 10, "decay": "1-sqrt", "beta1": 0.8, "beta2": 0.7, "eps": 1e-06,
  "weight_decay": 0.3, "rule": ["*.bias decay=0", "embed.* decay=0.5 rate=0.25", "head rate=2"],
  "momentum": "0.5", "nesterov": true, "muon_scale": "original", "muon_except": ["*.o_proj.*"],
  "adamw_rate": 0.5, "clip": 0.5, "on_nonfinite": "update", "loss_scale": "dynamic:1024",
  "updates": "blocking", "rounding": "stochastic",
  "ranks": 4, "outer": 2, "ep": 4, "tp": 2, "expert_capacity": 1.5,
  "expert_exchange": "padded", "strategy": "optim+hfsdp",
  "main_params": "none", "main_storage": "separate", "main_grads": "fp32", "grad_comm": "bf16",
  "moments": "fp8_e4m3/bf16", "pool": "on_demand", "prefetch": 3, "pool_budget": "4294967296",
  "other_units": "persistent", "user_buffers": "symmetric", "gradient_lifetime": "step",
  "granularity": "block(128)", "offload": 0.5,
  "device": "cpu", "cuda_graph": true, "threads": 2, "checked": true, "name_nan": true,
  "timeout": 12.5, "seed": 9223372036854775807, "deterministic": true,
  "checkpoint_dir": "runs/x", "checkpoint_every": 13, "keep_last": 5, "keep_every": 1000,
  "save": "blocking", "checkpoint_dtype": "bf16", "write_chunk": "1048576", "resume": "never",
  "restart_data": true, "allow_missing": ["*.bias"], "allow_extra": true, "export_dir": "weights",
  "export_every": 17, "patches": "patches", "patch_every": 4, "patch_names": "vllm",
  "keep_patches": 5,
  "log": "log", "tensorboard": "tb", "report": "none", "trace": "trace.json",
  "trace_steps": "2-9", "log_every": 11, "sample": "Once \"upon\"", "sample_tokens": 12,
  "peak_tflops": "989.4", "quiet": true})json";

Json printed(const TrainOptions& options) { return Json::parse(config_text(options)); }

TEST(Settings, EverySettingIsReadBackAsItWasGiven) {
  TrainOptions changed;
  apply_config(changed, kChanged, "changed");
  const Json defaults = printed({});
  const Json expected = Json::parse(kChanged);
  EXPECT_EQ(expected.size(), settings().size()) << "every setting, and each under its own name";
  const Json found = printed(changed);
  for (const auto& [key, value] : found.items()) {
    EXPECT_EQ(value, expected.value(key, Json())) << key;
    EXPECT_NE(value, defaults[key]) << key;
  }
  // Flags, and what is printed, set the same.
  GivenValues flags;
  for (const Setting& setting : settings(changed)) flags[setting.name] = setting.values;
  EXPECT_EQ(printed(given(flags)), expected);
  apply_config(changed, config_text({}), "printed");
  EXPECT_EQ(printed(changed), defaults);
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
  const RankDevice known{.device = DeviceChoice::kCuda, .peak_tflops = 312};
  EXPECT_EQ(given({{"peak-tflops", {"100"}}}).resolved(1, known).peak_tflops, 100);
  EXPECT_EQ(given({{"peak-tflops", {"0"}}}).resolved(1, known).peak_tflops, 0);
}

TEST(Settings, MomentsHaveOneTypeOrTwo) {
  const auto types = [](const char* text) { return given({{"moments", {text}}}).moments; };
  EXPECT_EQ(types("bf16").first, DType::kBFloat16);
  EXPECT_EQ(types("bf16").second, DType::kBFloat16);
  EXPECT_EQ(types("bf16/none").first, DType::kBFloat16);
  EXPECT_EQ(types("bf16/none").second, std::nullopt);
}

TEST(Settings, AnUnknownKeyIsAnsweredWithTheNearest) {
  TrainOptions options;
  EXPECT_EQ(error_of<UsageError>([&] { apply_config(options, R"({"step": 1})", "c.json"); }),
            "c.json: 'step' is no setting; did you mean 'steps'? fsdp train --print-config lists "
            "them all");
  EXPECT_THAT(error_of<UsageError>([&] { apply_config(options, R"({"zzzzzzzz": 1})", "c.json"); }),
              HasSubstr("--print-config"));
}

// Their names in the table of other programs' words: a setting, or a value of one.
TEST(Settings, HintsNameWhatThereIs) {
  std::set<std::string> known = {"check", "pool-budget-bytes"};  // of others than settings
  for (const Setting& setting : settings()) known.insert(setting.name);
  for (const Strategy& strategy : named_strategies()) known.insert(std::string(strategy.name));
  for (const DType dtype : all_dtypes()) known.insert(std::string(name_of(dtype)));
  known.insert({"adamw", "cosine", "constant", "cuda", "block"});
  for (const ForeignWord& row : foreign_words()) {
    EXPECT_TRUE(known.contains(std::string(row.name))) << row.words << ": " << row.name;
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

// The engine does so, too (registered_pool.h).
TEST(PlanOptionsOf, UserBuffersKeepTheMemoryOfUnlikeUnits) {
  const auto planned = [](const char* user_buffers, const char* other_units) {
    const TrainOptions options = given({{"pool", {"double_buffer"}},
                                        {"user-buffers", {user_buffers}},
                                        {"other-units", {other_units}}});
    return plan_options(options, 4, DType::kBFloat16).other_units;
  };
  EXPECT_EQ(planned("off", "on_demand"), OtherUnits::kOnDemand);
  EXPECT_EQ(planned("registered", "on_demand"), OtherUnits::kPersistent);
  EXPECT_EQ(planned("symmetric", "on_demand"), OtherUnits::kPersistent);
  EXPECT_EQ(planned("off", "persistent"), OtherUnits::kPersistent);
}

TEST(TrainOptions, TokensCountInStepsThatAreWhole) {
  const TrainOptions options = given({{"batch", {"4"}}, {"sequence", {"10"}}, {"tokens", {"101"}}});
  EXPECT_EQ(options.total_steps(), 3);
}

}  // namespace
}  // namespace fsdp::train::settings_test
