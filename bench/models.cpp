// bench_models: what one step of a model costs, forward and backward without sharding.
//
//   bench_models                                                    the small presets, fp32 on one
//   CPU thread bench_models --device cuda --model llama-1b --dtype bf16 --rows 4 --sequence 2048
#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <string>
#include <vector>

#include "fsdp/nn/config/presets.h"
#include "fsdp/nn/language_model.h"
#include "fsdp/plan/flops.h"

namespace {

struct Settings {
  std::vector<std::string> models = {"tiny", "moe-tiny", "hybrid-tiny"};
  std::string device = "cpu";
  std::string dtype = "fp32";
  int64_t rows = 4;
  int64_t sequence = 256;
  int threads = 1;
  double seconds = 3.0;
};

double seconds_now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

void measure(const fsdp::ModelPreset& preset, fsdp::Recompute recompute, const Settings& settings) {
  const auto model = fsdp::build_language_model(
      preset.config, {.seed = 1,
                      .recompute = recompute,
                      .dtype = settings.dtype == "bf16" ? at::kBFloat16 : at::kFloat});
  const at::Device device(settings.device);
  model->to(device);
  const at::Tensor tokens = at::arange(settings.rows * settings.sequence, at::kLong)
                                .mul_(7)
                                .remainder_(251)
                                .view({settings.rows, settings.sequence})
                                .to(device);
  const auto timed_step = [&] {
    const double before = seconds_now();
    const fsdp::ModelLoss loss = model->loss(tokens, tokens);
    loss.total.backward();
    for (at::Tensor& parameter : model->parameters()) parameter.mutable_grad() = at::Tensor();
    // Stands for what a training step reads, and waits for the device.
    const auto value = loss.total.item<double>();
    if (!(value > 0.0)) std::printf("# %s: loss is %g\n", preset.name, value);
    return seconds_now() - before;
  };
  timed_step();
  std::vector<double> times;
  for (const double begin = seconds_now(); seconds_now() - begin < settings.seconds;)
    times.push_back(timed_step());
  // The best: others may share the machine.
  const double best = times.empty() ? timed_step() : *std::min_element(times.begin(), times.end());
  const double rate = static_cast<double>(settings.rows * settings.sequence) / best;
  std::printf("%-12s %-10s %9.1f %10.0f %10.2f\n", preset.name,
              recompute == fsdp::Recompute::kNone ? "none" : "block", best * 1e3, rate,
              rate * fsdp::flops_per_token(preset.config, settings.sequence) * 1e-9);
  std::fflush(stdout);
}

}  // namespace

int main(int argc, char** argv) {
  Settings settings;
  CLI::App app("What one step of a model costs, forward and backward without sharding.");
  app.add_option("--model", settings.models, "Presets");
  app.add_option("--device", settings.device, "cpu or cuda")->check(CLI::IsMember({"cpu", "cuda"}));
  app.add_option("--dtype", settings.dtype, "fp32 or bf16")->check(CLI::IsMember({"fp32", "bf16"}));
  app.add_option("--rows", settings.rows, "Sequences per step");
  app.add_option("--sequence", settings.sequence, "Tokens per sequence");
  app.add_option("--threads", settings.threads, "Of the CPU");
  app.add_option("--seconds", settings.seconds, "To measure each");
  CLI11_PARSE(app, argc, argv);
  at::set_num_threads(settings.threads);
  std::printf("# %s, %s, %ld x %ld tokens, %d CPU threads; best step\n", settings.device.c_str(),
              settings.dtype.c_str(), settings.rows, settings.sequence, settings.threads);
  std::printf("%-12s %-10s %9s %10s %10s\n", "# model", "recompute", "ms", "tokens/s", "GFLOP/s");
  for (const std::string& name : settings.models) {
    const fsdp::ModelPreset* preset = fsdp::find_preset(name);
    if (preset == nullptr) {
      std::fprintf(stderr, "bench_models: preset '%s' is not known\n", name.c_str());
      return 2;
    }
    measure(*preset, fsdp::Recompute::kNone, settings);
    measure(*preset, fsdp::Recompute::kBlock, settings);
  }
  return 0;
}
