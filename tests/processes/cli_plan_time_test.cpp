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
    "--model tiny --ranks 2 --batch 8 --sequence 64 --rates cpu-2-cores --link 20MB ";

TEST(PlannedTime, IsShownAsWordsAndJson) {
  const CommandResult table = run_fsdp("plan " + kTimed);
  EXPECT_EQ(table.exit_code, 0) << table.err;
  EXPECT_THAT(table.out,
              AllOf(HasSubstr("time of a step, by the rates of Neoverse-N1, 2 cores ("),
                    HasSubstr("\nunits as measured\n"), HasSubstr("\n  computing  "),
                    HasSubstr("\n  gathers  "), HasSubstr(" of it with nothing beside it\n"),
                    HasSubstr(" of each rank; "), Not(HasSubstr("timeline"))));
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
  const std::string many = "--model llama-1b --ranks 64 --batch 1024 --sequence 512 --rates h200 ";
  const auto same = [&](const std::string& axes, const std::string& links, const Json& published) {
    SCOPED_TRACE(axes);
    Json taken = plan_json(many + axes)["time"];
    EXPECT_EQ(taken["published_links"], published);
    Json given = plan_json(many + axes + links)["time"];
    taken.erase("published_links");
    given.erase("published_links");
    EXPECT_EQ(taken, given);
  };
  same("--outer 8 ", "--link nvlink4 --outer-link 400g", {{"inner", "nvlink4"}, {"outer", "400g"}});
  same("--outer 8 --link-latency 500 ", "--link 450GB --outer-link 50GB",
       {{"inner", "nvlink4"}, {"outer", "400g"}});
  same("--tp 4 ", "--link 400g --group-link nvlink4", {{"inner", "400g"}, {"group", "nvlink4"}});
  // Names that are given are marked likewise.
  same("--outer 8 ", "--link nvlink --outer-link ib400", {{"inner", "nvlink4"}, {"outer", "400g"}});
  EXPECT_EQ(
      plan_json(many + "--link 400GB --outer 8 --outer-link eth100")["time"]["published_links"],
      Json({{"outer", "eth100"}}));
  const std::string says =
      "links by data sheet, not measured: inner nvlink4 (450 GB/s), outer 400g (50 GB/s); --link";
  EXPECT_THAT(run_fsdp("plan " + many + "--outer 8").out, HasSubstr(says));
  EXPECT_THAT(run_fsdp("plan " + many + "--link 1GB").out, Not(HasSubstr("by data sheet")));
  test::expect_only_error(run_fsdp("plan " + many + "--link ib200"), 2,
                          "--link is 'ib200'; it must be bytes per second, e.g. 300GB, or nvlink");
  EXPECT_THAT(run_fsdp("plan " + kTimed).out, Not(HasSubstr("by data sheet")));
}

TEST(PlannedTime, SaysWhatARunTakesAndHowMuchContentionCouldTake) {
  const std::string run =
      "--model llama3-8b --ranks 128 --batch 256 --sequence 8192 --rates h100 --tokens 15T ";
  const Json time = plan_json(run)["time"];
  EXPECT_EQ(time["training"]["tokens"], 15'000'000'000'000);
  EXPECT_EQ(time["training"]["steps"], 7'152'558);
  const double hours = 7'152'558 * time["step_ms"].get<double>() / 3.6e6;
  EXPECT_NEAR(time["training"]["days"].get<double>(), hours / 24, 1e-6 * hours);
  EXPECT_NEAR(time["training"]["rank_hours"].get<double>(), 128 * hours, 1e-4 * hours);
  EXPECT_GT(time["contended_step_ms"], 1.05 * time["step_ms"].get<double>());
  EXPECT_LT(time["contended_step_ms"], 1.7 * time["step_ms"].get<double>());
  EXPECT_THAT(run_fsdp("plan " + run).out,
              AllOf(HasSubstr("\n    with contention  "),
                    HasSubstr(", if kernels take 1.7 times as long beside collectives\n"),
                    HasSubstr("\n15,000,000,000,000 tokens: 7,152,558 steps, "),
                    HasSubstr(" hours of GPUs; with contention ")));
  const Json alone = plan_json(
      "--model llama-1b --ranks 1 --batch 4 --sequence 2048 --rates h200 --tokens 1.5B")["time"];
  EXPECT_FALSE(alone.contains("contended_step_ms"));
  EXPECT_EQ(alone["training"]["steps"], 183'106);
}

TEST(PlannedTime, SaysWhereItIsARoofline) {
  const std::string asked = "plan --model llama-1b --ranks 1 --sequence 2048 ";
  EXPECT_THAT(run_fsdp(asked + "--batch 3 --rates h200").out,
              HasSubstr("units by a roofline, through those that were measured with 4 x 2048"));
  EXPECT_THAT(run_fsdp(asked + "--batch 4 --rates h100").out,
              HasSubstr("(2026-11-19)\nunits by a roofline, products at 742.0 TFLOP/s, 75.0 % of "
                        "the peak in bf16 and passes at 2.76 TB/s: this model was not measured; "));
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
  const Json time =
      plan_json("--model tiny --batch 2 --sequence 8 --ranks 2 --rates " + file)["time"];
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
           "--microbatches is '2', which matters for the peak of a step alone; give --batch and "},
          {"--model tiny --ranks 1 --batch 1 --sequence 8 --tokens 1B",
           "--tokens is '1B', which matters for the time of a step alone; give --rates, too"},
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
  expect_refused(
      "--model tiny --ranks 2 --batch 2 --sequence 8 --rates cpu-2-cores",
      {
          {"--link nvlink", "--link is 'nvlink', but the rates of Neoverse-N1, 2 cores"},
          {"--tokens 1.00000001K", "--tokens is '1.00000001K'; it must be a whole number from 0"},
          {"--link fast", "--link is 'fast'"},
          {"--link 0", "--link is '0'"},
      });
}

}  // namespace
}  // namespace fsdp::cli_plan_time_test
