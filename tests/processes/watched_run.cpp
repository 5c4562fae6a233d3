// Writes what a run leaves behind (log, event files, report) from figures like those of a real one:
// for tests in which strangers read them.
//
//   watched_run FOLDER STEPS [RESUMED_STEP]
//
// Prints how long the watching of one step took.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <iostream>
#include <random>

#include "fsdp/base/error.h"
#include "fsdp/train/run_watch.h"

namespace {

using namespace fsdp;
using namespace fsdp::train;

RunFacts facts_of(int64_t num_steps, int64_t resumed_step) {
  constexpr int64_t kMiB = 1 << 20;
  return {.title = "tiny: Llama with 1.8 M parameters on 2 ranks",
          .settings = {{"model", "model", "tiny", false, "preset or config.json"},
                       {"model", "sequence", "256", true, "tokens of one sequence"},
                       {"data", "data", "docs, src, README.md", true, "files or directories"},
                       {"training", "steps", std::to_string(num_steps), true, ""},
                       {"training", "lr", "0.003", true, "highest learning rate"},
                       {"sharding", "ranks", "2", false, ""},
                       {"output", "<b>not bold</b> & \"quoted\"",
                        "a/very/long/path/without/any/blank/" + std::string(80, 'x'), true, ""}},
          .environment = {{"host", "node1"}, {"libtorch", "2.13.0"}},
          .memory = {{"weights", 4 * kMiB, kUnknownBytes, false},
                     {"main gradients", 4 * kMiB, kUnknownBytes, false},
                     {"moments", 8 * kMiB, kUnknownBytes, false},
                     {"gathered weights", 3 * kMiB, kUnknownBytes, false},
                     {"gradient buckets", 3 * kMiB, kUnknownBytes, false}},
          .resumed_step = resumed_step};
}

std::vector<MemoryRow> measured(std::vector<MemoryRow> rows) {
  for (MemoryRow& row : rows) row.measured_bytes = row.forecast_bytes - row.forecast_bytes / 50;
  rows.push_back({"activations", kUnknownBytes, 11 << 20, false});
  return rows;
}

// Forward and backward through eight layers: gathers run ahead, reductions behind.
std::vector<TimelineSpan> timeline() {
  std::vector<TimelineSpan> spans;
  double now = 1500;
  for (int microbatch = 0; microbatch < 2; ++microbatch) {
    for (int layer = 0; layer < 8; ++layer, now += 7000) {
      const std::string name = "layer " + std::to_string(layer);
      spans.push_back({"gather", now - 1400, now - 200, "gather " + name});
      for (double part = 0; part < 6800; part += 40)  // operators
        spans.push_back({"compute", now + part, now + part + 36, name + " forward"});
    }
    for (int layer = 7; layer >= 0; --layer, now += 14000) {
      const std::string name = "layer " + std::to_string(layer);
      spans.push_back({"gather", now - 1400, now - 200, "gather " + name});
      spans.push_back({"compute", now, now + 13800, name + " backward"});
      spans.push_back({"reduce", now + 13900, now + 16900, "reduce " + name});
    }
  }
  spans.push_back({"update", now + 3200, now + 9200, "AdamW"});
  return spans;
}

double expected_loss(int64_t step, int64_t num_steps) {
  const auto at = static_cast<double>(step);
  return 1.55 + 2.5 * std::exp(-at / 60) + 1.5 / (1 + at / 8) -
         0.15 * at / static_cast<double>(num_steps);
}

StepRecord step_record(int64_t step, int64_t num_steps, std::mt19937& random) {
  std::normal_distribution<double> noise;
  const auto at = static_cast<double>(step);
  const double part = at / static_cast<double>(num_steps);
  const double rate = 3e-3 * std::min(at / 20, 0.1 + 0.45 * (1 + std::cos(M_PI * part)));
  double loss =
      1.55 + 2.5 * std::exp(-at / 60) + 1.5 / (1 + at / 8) - 0.15 * part + 0.035 * noise(random);
  if (step == num_steps * 3 / 5) loss += 0.6;
  const double ms = 338 + 6 * noise(random) + (step == 1 ? 900 : 0);
  return {.step = step,
          .total_steps = num_steps,
          .loss = loss,
          .learning_rate = rate,
          .gradient_norm = 0.35 + 2.4 * std::exp(-at / 30) + 0.06 * std::abs(noise(random)),
          .milliseconds = ms,
          .tokens_per_second = 8192 / ms * 1000,
          .teraflops = 0.11,
          .mfu = 0.31,
          .peak_bytes = 33 << 20,
          .tokens = 8192 * step,
          .is_skipped = false,
          .terms = {{"cross_entropy", loss}}};
}

void run(const std::string& folder, int64_t num_steps, int64_t resumed_step) {
  RunFacts facts = facts_of(num_steps, resumed_step);
  RunWatch watch({.log_path = folder + "/log.jsonl",
                  .tensorboard_dir = folder + "/events",
                  .report_path = folder + "/report.html",
                  .console = {.is_quiet = true}},
                 facts, std::cout);
  std::mt19937 random(7);
  double watched_us = 0;
  for (int64_t step = 1; step <= num_steps; ++step) {
    const StepRecord record = step_record(step, num_steps, random);
    if (step <= resumed_step) continue;
    const auto begin = std::chrono::steady_clock::now();
    watch.step(record);
    watched_us +=
        std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - begin).count();
    if (step == resumed_step + 1) watch.memory(measured(facts.memory));
    if (step == resumed_step + 3) watch.timeline(timeline());
    if (step % std::max<int64_t>(1, num_steps / 15) == 0)
      watch.validation(
          {.step = step,
           .loss = expected_loss(step, num_steps) +
                   0.06 * std::sqrt(static_cast<double>(step) / static_cast<double>(num_steps)),
           .tokens = 65536,
           .milliseconds = 900});
    if (step % std::max<int64_t>(1, num_steps / 3) == 0)
      watch.checkpoint({.step = step,
                        .path = "runs/tiny/checkpoints/step_" + std::to_string(step),
                        .bytes = 21 << 20,
                        .blocked_milliseconds = 12.4,
                        .milliseconds = 310});
  }
  watch.sample({.step = num_steps,
                .prompt = "A rank holds",
                .continuation = " its shard of every weight, <and> gathers\nthe rest when a layer "
                                "needs it: \xc3\xa9\xff\x1b[2J"});
  watch.end({.step = num_steps,
             .num_steps = num_steps - resumed_step,
             .seconds = 112,
             .stopped_by = num_steps % 2 == 0 ? "" : "SIGTERM"});
  std::printf("%.1f us per step\n", watched_us / static_cast<double>(num_steps - resumed_step));
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 3) {
    std::fprintf(stderr, "watched_run: use watched_run FOLDER STEPS [RESUMED_STEP].\n");
    return 2;
  }
  try {
    run(argv[1], std::atoll(argv[2]), argc > 3 ? std::atoll(argv[3]) : 0);
  } catch (const fsdp::Error& error) {
    std::fprintf(stderr, "watched_run: %s\n", error.what());
    return 1;
  }
  return 0;
}
