// bench_gpu: what a training step takes on a device, sharded and unsharded: one JSON line per row.
// bench/gpu.py runs it beside the peers and writes the table.
//
//   bench_gpu --model llama-1b --rows plain-same ours
//   bench_gpu --model tiny --device cpu --steps 2
#include <ATen/ATen.h>
#include <torch/csrc/autograd/profiler_kineto.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <memory>
#include <nlohmann/json.hpp>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#include "device_meter.h"
#include "fsdp/base/check.h"
#include "fsdp/nn/config/config_json.h"
#include "fsdp/nn/config/model_config.h"
#include "fsdp/nn/config/presets.h"
#include "gpu_rows.h"
#include "host_ranges.h"
#include "timings.h"

namespace {

using bench::Batch;
using nlohmann::json;

// The steps whose losses are compared, here and in gpu_peers.py.
constexpr size_t kLossAfter = 20;
constexpr int kProfiledSteps = 2;
// So few tokens that the device is done before the host has asked for more.
constexpr int64_t kHostTokens = 16;
constexpr int kHostSteps = 3;  // of a turn; the best counts

struct Settings {
  std::string model = "llama-1b";
  std::string device = "cuda";
  std::vector<std::string> rows;
  int64_t batch = 4;
  int64_t sequence = 0;  // 0: as the table has it
  int warm_up = 5;
  int steps = 20;
  double lr = bench::AdamWRates().lr;
  std::string tokens;   // a file
  std::string profile;  // a folder
  bool deterministic = false;
  int64_t offload_chunk = 0;  // 0: the default
  int host_turns = 0;         // 0: whole measurements
};

// Reads a preset, or a config.json of the Llama family.
fsdp::ModelConfig config_of(const Settings& settings) {
  if (const fsdp::ModelPreset* preset = fsdp::find_preset(settings.model)) return preset->config;
  std::ifstream file(settings.model);
  if (!file)
    throw fsdp::UsageError(fsdp::concat("--model is '", settings.model,
                                        "'; give a config.json or one of ",
                                        fsdp::join(fsdp::preset_names(), ", ")));
  std::ostringstream text;
  text << file.rdbuf();
  return fsdp::parse_model_config(text.str(), settings.model);
}

int64_t sequence_of(const Settings& settings) {
  if (settings.sequence > 0) return settings.sequence;
  if (settings.model == "llama-1b") return 2048;
  return settings.model == "llama-110m" ? 512 : 64;
}

// A file of batch x (sequence + 1) int32 numbers, which the peers read, too; without one, some
// numbers.
Batch read_batch(const Settings& settings, int64_t vocab_size, c10::Device device) {
  const int64_t sequence = sequence_of(settings);
  at::Tensor text = at::empty({settings.batch, sequence + 1}, at::kInt);
  if (settings.tokens.empty()) {
    at::Generator generator = at::detail::createCPUGenerator(/*seed_val=*/1);
    text.random_(0, vocab_size, generator);
  } else {
    std::ifstream file(settings.tokens, std::ios::binary);
    const auto num_bytes = static_cast<std::streamsize>(text.nbytes());
    FSDP_CHECK(file.read(static_cast<char*>(text.mutable_data_ptr()), num_bytes), "--tokens is '",
               settings.tokens, "', which does not hold ", num_bytes, " bytes: ", settings.batch,
               " x ", sequence + 1, " int32 numbers");
  }
  text = text.to(at::kLong);
  return {text.narrow(1, 0, sequence).contiguous().to(device),
          text.narrow(1, 1, sequence).contiguous().to(device)};
}

double milliseconds_of(const std::function<void()>& call) {
  const auto begin = std::chrono::steady_clock::now();
  call();
  return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - begin)
      .count();
}

// How long the calls of a step take until they return. The best: whatever else the machine does can
// only make a step slower.
double host_milliseconds(const std::function<void()>& step, c10::Device device, int steps) {
  std::vector<double> times;
  for (int i = 0; i < steps; ++i) {
    bench::synchronize(device);
    times.push_back(milliseconds_of(step));
  }
  bench::synchronize(device);
  return *std::min_element(times.begin(), times.end());
}

Batch few_tokens_of(const Batch& batch) {
  return {batch.tokens.slice(0, 0, 1).slice(1, 0, kHostTokens).contiguous(),
          batch.targets.slice(0, 0, 1).slice(1, 0, kHostTokens).contiguous()};
}

// The host's milliseconds when the device never makes it wait.
double few_tokens_host_milliseconds(bench::Trainee& trainee, const Batch& batch, int steps) {
  const auto step = [&, few = few_tokens_of(batch)] { trainee.step(few); };
  host_milliseconds(step, batch.tokens.device(), 3);
  return host_milliseconds(step, batch.tokens.device(), steps);
}

// The engine's ranges on the host, beside the trace they belong to.
void save(const std::vector<bench::HostRange>& ranges, const std::string& path) {
  json list = json::array();
  for (const bench::HostRange& range : ranges)
    list.push_back({{"name", range.name}, {"begin_ns", range.begin_ns}, {"end_ns", range.end_ns}});
  std::ofstream(path) << list.dump() << "\n";
}

// Writes what the device ran in a few steps as a trace for chrome://tracing and
// bench/gpu_profile.py, and with the host's ranges for bench/gpu_timeline.py.
void profile(const std::function<void()>& step, const std::function<void()>& finish,
             c10::Device device, const std::string& path) {
  using torch::profiler::impl::ActivityType;
  const torch::profiler::impl::ProfilerConfig config(torch::profiler::impl::ProfilerState::KINETO);
  const std::set<ActivityType> activities = {device.is_cpu() ? ActivityType::CPU
                                                             : ActivityType::CUDA};
  finish();
  bench::synchronize(device);
  torch::autograd::profiler::prepareProfiler(config, activities);
  torch::autograd::profiler::enableProfiler(config, activities);
  bench::HostRanges ranges("fsdp::");
  for (int i = 0; i < kProfiledSteps; ++i) step();
  finish();
  bench::synchronize(device);
  torch::autograd::profiler::disableProfiler()->save(path + ".json");
  save(ranges.finish(), path + ".host.json");
}

c10::Device device_of(const Settings& settings) {
  return settings.device == "cpu" ? c10::Device("cpu") : c10::Device("cuda:0");
}

std::unique_ptr<bench::Trainee> make_trainee(const bench::Row& row, const Settings& settings) {
  const c10::Device device = device_of(settings);
  return row.make({.config = config_of(settings),
                   .device = device,
                   .compute = device.is_cpu() ? at::kFloat : at::kBFloat16,
                   .rates = {.lr = settings.lr},
                   .offload_chunk = settings.offload_chunk});
}

// The host's milliseconds of rows that take turns in one process. Processes of their own differ by
// more than sharding costs: by where their threads and memory happen to be.
void print_host_turns(const Settings& settings) {
  const c10::Device device = device_of(settings);
  const fsdp::ModelConfig config = config_of(settings);
  const Batch few = few_tokens_of(read_batch(settings, fsdp::vocab_size_of(config), device));
  std::vector<std::unique_ptr<bench::Trainee>> trainees;
  std::vector<std::vector<double>> turns(settings.rows.size());
  for (const std::string& name : settings.rows) {
    trainees.push_back(make_trainee(bench::find_row(name), settings));
    for (int i = 0; i < settings.warm_up; ++i) trainees.back()->step(few);
  }
  for (int turn = 0; turn < settings.host_turns; ++turn)
    for (size_t row = 0; row < trainees.size(); ++row)
      turns[row].push_back(
          host_milliseconds([&] { trainees[row]->step(few); }, device, kHostSteps));
  for (size_t row = 0; row < trainees.size(); ++row)
    std::printf("%s\n", json{{"row", settings.rows[row]},
                             {"model", settings.model},
                             {"units", bench::num_units(config)},
                             {"host_turns_ms", turns[row]}}
                            .dump()
                            .c_str());
}

json measure(const bench::Row& row, const Settings& settings) {
  const fsdp::ModelConfig config = config_of(settings);
  const c10::Device device = device_of(settings);
  const Batch batch = read_batch(settings, fsdp::vocab_size_of(config), device);
  const std::unique_ptr<bench::Trainee> trainee = make_trainee(row, settings);
  std::vector<at::Tensor> losses;
  const std::function<void()> step = [&] {
    trainee->step(batch);
    losses.push_back(trainee->loss().clone());
  };

  bench::forget_peak(device);
  for (int i = 0; i < settings.warm_up; ++i) step();
  bench::DeviceClock clock(device);
  clock.mark();
  for (int i = 0; i < settings.steps; ++i) {
    step();
    clock.mark();
  }
  const std::vector<double> times = clock.milliseconds();
  const bench::DeviceMemory memory = bench::device_memory(device);
  const double busy_host_ms = host_milliseconds(step, device, settings.steps);
  const double host_ms = row.launch == bench::Launch::kGraph
                             ? busy_host_ms  // one launch, which never fills the device's queue
                             : few_tokens_host_milliseconds(*trainee, batch, settings.steps);
  // Last, since what a profiler leaves behind slows every later launch.
  if (!settings.profile.empty())
    profile(
        step, [&] { trainee->finish(); }, device,
        settings.profile + "/" + std::filesystem::path(settings.model).stem().string() + "-" +
            std::string(row.name));

  const auto num_steps = static_cast<size_t>(settings.warm_up + settings.steps);
  std::vector<double> loss_values;
  for (const at::Tensor& loss : losses) loss_values.push_back(loss.item<double>());
  constexpr double kMegabyte = 1e6;
  return {{"row", row.name},
          {"model", settings.model},
          {"device", settings.device},
          {"batch", settings.batch},
          {"sequence", sequence_of(settings)},
          {"units", bench::num_units(config)},
          {"ms", bench::median(times)},
          {"step_ms", times},
          {"host_ms", host_ms},
          {"busy_host_ms", busy_host_ms},
          {"peak_mb", static_cast<double>(memory.peak_bytes) / kMegabyte},
          {"reserved_mb", static_cast<double>(memory.reserved_bytes) / kMegabyte},
          {"in_use_mb", static_cast<double>(memory.in_use_bytes) / kMegabyte},
          {"loss", loss_values[std::min(kLossAfter, num_steps - 1)]},
          {"losses", loss_values}};
}

void check_device(const Settings& settings) {
  if (settings.device == "cpu" || at::hasCUDA()) return;
  throw fsdp::UsageError(
      fsdp::concat("--device is '", settings.device,
                   "', but there is no GPU here, or libtorch is built for CPUs alone; use --device "
                   "cpu --model tiny to try the program"));
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app{"What a training step takes on a device, sharded and unsharded", "bench_gpu"};
  Settings settings;
  std::string list = "rows, one after the other (default: all without a graph):";
  for (const bench::Row& row : bench::rows()) {
    if (row.launch == bench::Launch::kEager) settings.rows.emplace_back(row.name);
    list += fsdp::concat("\n  ", row.name, ": ", row.summary);
  }
  app.add_option("--model", settings.model, "a preset of the Llama family, or a config.json");
  app.add_option("--device", settings.device, "cuda or cpu")->check(CLI::IsMember({"cuda", "cpu"}));
  app.add_option("--rows", settings.rows, list);
  app.add_option("--batch", settings.batch, "sequences per step")->check(CLI::PositiveNumber);
  app.add_option("--sequence", settings.sequence, "tokens of each; 0: as the table has it");
  app.add_option("--warm-up", settings.warm_up, "steps before those that are timed")
      ->check(CLI::PositiveNumber);
  app.add_option("--steps", settings.steps, "steps that are timed; the median counts")
      ->check(CLI::PositiveNumber);
  app.add_option("--lr", settings.lr, "learning rate")->capture_default_str();
  app.add_option("--tokens", settings.tokens, "a file of batch x (sequence + 1) int32 numbers");
  app.add_option("--offload-chunk", settings.offload_chunk,
                 "elements that travel together to and from the host; 0: the default");
  app.add_flag("--deterministic", settings.deterministic,
               "libtorch's kernels that add in the same order every time; slower");
  app.add_option("--host-turns", settings.host_turns,
                 "only the host's time: all rows in one process, this many times by turns")
      ->check(CLI::NonNegativeNumber);
  app.add_option("--profile", settings.profile, "a folder for traces of what the device ran");
  CLI11_PARSE(app, argc, argv);
  setenv("FSDP_LOG", "warning", 0);

  try {
    check_device(settings);
    if (settings.deterministic) {
      setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8", 0);  // or libtorch refuses
      at::globalContext().setDeterministicAlgorithms(true, /*warn_only=*/false);
      at::globalContext().setDeterministicFillUninitializedMemory(false);
    }
    if (settings.host_turns > 0) {
      print_host_turns(settings);
      return 0;
    }
    for (const std::string& name : settings.rows) {
      std::printf("%s\n", measure(bench::find_row(name), settings).dump().c_str());
      std::fflush(stdout);
    }
  } catch (const std::exception& error) {
    std::fprintf(stderr, "bench_gpu: %s\n", error.what());
    return 1;
  }
  return 0;
}
