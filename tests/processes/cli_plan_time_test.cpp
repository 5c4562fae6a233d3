// The time of a step in `fsdp plan`: over slow links, as words, JSON and a picture, and every wrong
// value.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string>
#include <vector>

#include "processes/plan_command.h"

namespace fsdp::cli_plan_time_test {
namespace {

using test::BadUse;
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

std::string text_of(const std::string& path) {
  std::ostringstream text;
  text << std::ifstream(path).rdbuf();
  return text.str();
}

// Links this slow decide: each way to share work waits for the kind of traffic that it is made of.
// `bench/forecast.py --set slow-links` compares these forecasts with measured steps.
TEST(PlannedTime, NamesWhatSlowLinksExpose) {
  struct Run {
    std::string model, settings, bandwidth, exposed;
  };
  const std::vector<Run> runs = {
      {"tiny", "--ranks 2", "5MB", "gather"},
      {"tiny", "--ranks 2 --prefetch 0", "5MB", "gather"},
      {"tiny", "--ranks 2 --strategy optim", "5MB", "gather"},
      {"tiny", "--ranks 4 --outer 2 --recompute block", "5MB", "gather"},
      {"tiny", "--ranks 2 --tp 2", "1MB", "exchange"},  // so little that 5 MB/s would not decide
      {"moe-tiny", "--ranks 2 --ep 2", "5MB", "exchange"}};
  for (const auto& [model, settings, bandwidth, exposed] : runs) {
    SCOPED_TRACE(model + " " + settings);
    const TextFile config("run.json",
                          R"({"model": ")" + model + R"(", "batch": 4, "sequence": 16})");
    const Json time = plan_json("--config " + config.path() + " " + settings +
                                " --rates cpu-2-cores --link " + bandwidth)["time"];
    double others = 0;
    for (const auto& [kind, ms] : time["exposed_ms"].items())
      if (kind != exposed) others += ms.get<double>();
    EXPECT_GT(time["exposed_ms"][exposed], 0.0);
    EXPECT_GT(time["exposed_ms"][exposed].get<double>() + others,
              0.5 * time["step_ms"].get<double>());
  }
}

TEST(PlannedTime, IsShownAsWordsAndJson) {
  const CommandResult table = run_fsdp("plan " + kTimed);
  EXPECT_EQ(table.exit_code, 0) << table.err;
  EXPECT_THAT(table.out, AllOf(HasSubstr("time of a step, by the rates of Neoverse-N1, 2 cores ("),
                               HasSubstr("\n  computing  "), HasSubstr("\n  gathers  "),
                               HasSubstr(" of it with nothing beside it\n"),
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

TEST(PlannedTime, IsDrawnAndListed) {
  const CommandResult list = run_fsdp("plan " + kTimed + "--timeline");
  EXPECT_THAT(list.out, AllOf(HasSubstr("timeline of a step, ms\n"),
                              HasSubstr("  compute  model.layers.0 forward\n"),
                              HasSubstr("  reduce   lm_head\n")));
  const TextFile page("step.html", "");
  EXPECT_EQ(run_fsdp("plan " + kTimed + "--picture " + page.path()).exit_code, 0);
  EXPECT_THAT(text_of(page.path()),
              AllOf(HasSubstr("Forecast: tiny on 2 ranks"), HasSubstr("Timeline of one step"),
                    HasSubstr("<title>model.layers.1 backward, ")));
}

TEST(PlannedTime, GrowsWithWhatAStepDoes) {
  const auto step_ms = [](const std::string& more) {
    return plan_json(kTimed + more)["time"]["step_ms"].get<double>();
  };
  const double plain = step_ms("");
  EXPECT_GT(step_ms("--recompute block"), plain);
  EXPECT_GT(step_ms("--microbatches 2"), 1.5 * plain);
  EXPECT_GT(step_ms("--prefetch 0"), plain);
  EXPECT_GT(step_ms("--link-latency 5000"), plain);
  EXPECT_EQ(step_ms("--group-link 1MB"), plain);  // nothing is exchanged
  EXPECT_GT(step_ms("--tp 2 --group-link 1MB"), step_ms("--tp 2"));
}

TEST(PlannedTime, AnswersEveryWrongValueWithOneSentence) {
  const TextFile damaged("rates.json", R"({"format": "fsdp rates", "version": 7})");
  const std::string version =
      "--model tiny --ranks 1 --batch 1 --sequence 8 --rates " + damaged.path();
  test::expect_only_error(run_fsdp("plan " + version), 2, "version is 7, and this command reads 1");
  // Said before anything is measured, which is announced on standard error.
  test::expect_only_error(run_fsdp("plan --calibrate /proc/rates.json --device cpu"), 1,
                          "/proc/.rates.json.");
  expect_refused({
      {"--model tiny --ranks 1 --rates cpu-2-cores",
       "--rates is 'cpu-2-cores', but no batch; give --batch and --sequence, too"},
      {"--model tiny --ranks 1 --batch 1 --sequence 8 --rates h900",
       "--rates is 'h900', which is neither a file nor one of "},
      {"--model tiny --ranks 1 --link 1GB",
       "--link is given, which matters for the time of a step"},
      {"--model tiny --ranks 1 --timeline", "--timeline is given, which matters for the time"},
      {"--model tiny --ranks 1 --microbatches 2",
       "--microbatches is '2', which matters for the time of a step alone; give --rates, too"},
      {"--model tiny --ranks 1 --batch 1 --sequence 8 --rates cpu-2-cores --compare",
       "--compare has no column for"},
      {"--model tiny --ranks 2 --batch 1 --sequence 8 --rates cpu-2-cores --link fast",
       "--link is 'fast'"},
      {"--model tiny --ranks 2 --batch 1 --sequence 8 --rates cpu-2-cores --link 0",
       "--link is '0'"},
      {"--model tiny --ranks 2 --batch 1 --sequence 8 --rates cpu-2-cores --link-latency -1",
       "--link-latency is '-1'"},
      {"--model tiny --ranks 1 --batch 1 --sequence 8 --rates cpu-2-cores --compute bf16",
       "have no 'product bf16 forward'; measure a machine that computes it"},
      {"--model hybrid-tiny --ranks 1 --batch 1 --sequence 8 --rates cpu-2-cores",
       "the time of model 'hybrid-tiny' is not known; it is for the Llama family"},
      {"--calibrate /tmp", "--calibrate is '/tmp', which is a directory; name a file in it"},
      {"--model tiny --ranks 1 --device cpu",
       "--device is 'cpu', which matters for --calibrate alone; drop it"},
      {"--calibrate rates.json --device tpu", "--device is 'tpu'"},
      {"--calibrate rates.json --device cpu --threads 0", "--threads is '0'"},
  });
}

}  // namespace
}  // namespace fsdp::cli_plan_time_test
