// The time of a step in `fsdp plan`: as words, JSON and a picture, by shipped and calibrated rates,
// and every wrong value.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "fsdp/base/durable_file.h"
#include "processes/plan_command.h"

namespace fsdp::cli_plan_time_test {
namespace {

using test::CommandResult;
using test::expect_refused;
using test::plan_json;
using test::run_fsdp;
using test::TextFile;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;
using Json = nlohmann::json;

const std::string kTimed =
    "--model tiny --ranks 2 --batch 4 --sequence 64 --rates cpu-2-cores --link 20MB ";

TEST(PlannedTime, IsShownAsWordsAndJson) {
  const CommandResult table = run_fsdp("plan " + kTimed);
  EXPECT_EQ(table.exit_code, 0) << table.err;
  EXPECT_THAT(table.out,
              AllOf(HasSubstr("time of a step, by the rates of Neoverse-N1, 2 cores ("),
                    HasSubstr("\nunits as measured\n"), HasSubstr("\n  computing  "),
                    HasSubstr("\n  gathers  "), HasSubstr(" of it with nothing beside it\n"),
                    HasSubstr(" tokens/s; "), Not(HasSubstr("timeline"))));
  EXPECT_THAT(run_fsdp("plan --model tiny --ranks 2").out, Not(HasSubstr("time of a step")));
  const Json time = plan_json(kTimed)["time"];
  EXPECT_FALSE(time.contains("muon_ms"));
  const std::string muon = kTimed + "--optimizer muon ";
  EXPECT_THAT(run_fsdp("plan " + muon).out, HasSubstr(" of it, those of the busiest owner\n"));
  const Json with_matrices = plan_json(muon)["time"];
  EXPECT_GT(with_matrices["muon_ms"], 0.0);
  EXPECT_GT(with_matrices["update_ms"], with_matrices["muon_ms"]);
  const double all = time["compute_ms"].get<double>() + time["update_ms"].get<double>();
  EXPECT_GT(time["step_ms"], all);
  EXPECT_NEAR(time["tokens_per_s"].get<double>() * time["step_ms"].get<double>(), 2 * 4 * 64 * 1e3,
              1e-6 * 512e3);
}

TEST(PlannedTime, TakesPublishedLinksAndSaysSo) {
  const std::string many = "--model llama-1b --ranks 64 --batch 64 --sequence 512 --rates h200 ";
  const auto same = [&](const std::string& axes, const std::string& links, const Json& published) {
    SCOPED_TRACE(axes);
    Json taken = plan_json(many + axes)["time"];
    EXPECT_EQ(taken["published_links"], published);
    taken.erase("published_links");
    EXPECT_EQ(taken, plan_json(many + axes + links)["time"]);
  };
  same("--outer 8 ", "--link nvlink4 --outer-link 400g", {{"inner", "nvlink4"}, {"outer", "400g"}});
  same("--outer 8 --link-latency 500 ", "--link 450GB --outer-link 50GB",
       {{"inner", "nvlink4"}, {"outer", "400g"}});
  same("--tp 4 ", "--link 400g --group-link nvlink4", {{"inner", "400g"}, {"group", "nvlink4"}});
  const std::string says =
      "links as published, not measured: inner nvlink4 (450 GB/s), outer 400g (50 GB/s); --link";
  EXPECT_THAT(run_fsdp("plan " + many + "--outer 8").out, HasSubstr(says));
  EXPECT_THAT(run_fsdp("plan " + many + "--link 1GB").out, Not(HasSubstr("published")));
  EXPECT_THAT(run_fsdp("plan " + kTimed).out, Not(HasSubstr("published")));
}

TEST(PlannedTime, SaysWhereItIsARoofline) {
  const std::string asked = "plan --model llama-1b --ranks 1 --sequence 2048 ";
  EXPECT_THAT(run_fsdp(asked + "--batch 3 --rates h200").out,
              HasSubstr("units by a roofline, through those that were measured with 4 x 2048"));
  EXPECT_THAT(run_fsdp(asked + "--batch 4 --rates h100").out,
              HasSubstr("(2026-11-19)\nunits by a roofline: this model was not measured; "));
  EXPECT_EQ(
      plan_json(
          "--model hybrid-tiny --ranks 1 --batch 1 --sequence 64 --rates h200")["time"]["source"],
      "roofline");
}

TEST(PlannedTime, TakesWhatWasCalibrated) {
  const TextFile folder("rates.json", "");
  const std::string file = folder.path() + ".calibrated.json";
  const std::string run = "--model tiny --batch 1 --sequence 8 ";
  const CommandResult measured = run_fsdp("plan --device cpu --calibrate " + file + " " + run);
  EXPECT_EQ(measured.exit_code, 0) << measured.err;
  EXPECT_THAT(measured.out, HasSubstr("parts of 1 model on "));
  EXPECT_THAT(measured.err, AllOf(HasSubstr("tiny, 1 x 8 tokens"), Not(HasSubstr("left out"))));
  const Json time = plan_json(run + "--ranks 2 --rates " + file)["time"];
  EXPECT_EQ(time["source"], "measured");
  EXPECT_GT(time["gather_ms"], 0.0);
  ::unlink(file.c_str());
}

TEST(PlannedTime, IsDrawnAndListed) {
  const CommandResult list = run_fsdp("plan " + kTimed + "--timeline");
  EXPECT_THAT(list.out, AllOf(HasSubstr("timeline of a step, ms\n"),
                              HasSubstr("  compute  model.layers.0 forward\n"),
                              HasSubstr("  reduce   lm_head\n")));
  const TextFile page("step.html", "");
  EXPECT_EQ(run_fsdp("plan " + kTimed + "--picture " + page.path()).exit_code, 0);
  EXPECT_THAT(read_text_file(page.path(), 1 << 20),
              AllOf(HasSubstr("Forecast: tiny on 2 ranks"), HasSubstr("Timeline of one step"),
                    HasSubstr("\"model.layers.1 backward\"]")));
}

TEST(PlannedTime, AnswersEveryWrongValueWithOneSentence) {
  const TextFile damaged("rates.json", R"({"format": "fsdp rates", "version": 7})");
  const std::string version =
      "--model tiny --ranks 1 --batch 1 --sequence 8 --rates " + damaged.path();
  test::expect_only_error(run_fsdp("plan " + version), 2, "version is 7, and this command reads 2");
  // Said before anything is measured, which is announced on standard error.
  test::expect_only_error(run_fsdp("plan --calibrate /proc/rates.json --device cpu"), 1,
                          "/proc/.rates.json.");
  expect_refused(
      "",
      {
          {"--model tiny --ranks 1 --rates cpu-2-cores",
           "--rates is 'cpu-2-cores', but no batch; give --batch and --sequence, too"},
          {"--model tiny --ranks 1 --batch 1 --sequence 8 --rates h900",
           "--rates is 'h900', which is neither a file nor one of "},
          {"--model tiny --ranks 1 --link 1GB",
           "--link is given, which matters for the time of a step"},
          {"--model tiny --ranks 1 --microbatches 2",
           "--microbatches is '2', which matters for the time of a step alone; give --rates, too"},
          {"--model tiny --ranks 1 --batch 1 --sequence 8 --rates cpu-2-cores --compare",
           "--compare has no column for"},
          {"--model tiny --ranks 1 --batch 1 --sequence 8 --rates cpu-2-cores --compute bf16",
           "have no products 'bf16'; measure a machine that computes them"},
          {"--calibrate /tmp", "--calibrate is '/tmp', which is a directory; name a file in it"},
          {"--calibrate rates.json --model tiny --device cpu",
           "--calibrate measures models that can be trained; give a config.json or a known "
           "model, "},
          {"--model tiny --ranks 1 --device cpu",
           "--device is 'cpu', which matters for --calibrate alone; drop it"},
          {"--calibrate rates.json --device tpu", "--device is 'tpu'"},
      });
  expect_refused("--model tiny --ranks 2 --batch 1 --sequence 8 --rates cpu-2-cores",
                 {
                     {"--link fast", "--link is 'fast'"},
                     {"--link 0", "--link is '0'"},
                 });
}

}  // namespace
}  // namespace fsdp::cli_plan_time_test
