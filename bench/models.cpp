// bench_models: tokens per second of every preset that fits a CPU, forward and backward without
// sharding, on one thread.
//
//   bench_models [SECONDS] [PRESET...]
#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include <chrono>
#include <cstdio>
#include <string>
#include <vector>

#include "fsdp/nn/flops.h"
#include "fsdp/nn/language_model.h"
#include "fsdp/nn/presets.h"

namespace {

constexpr int64_t kRows = 4;
constexpr int64_t kSequence = 256;

double seconds_now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

void measure(const fsdp::ModelPreset& preset, fsdp::Recompute recompute, double seconds) {
  const auto model = fsdp::build_language_model(preset.config, {.seed = 1, .recompute = recompute});
  const at::Tensor tokens =
      at::arange(kRows * kSequence, at::kLong).mul_(7).remainder_(251).view({kRows, kSequence});
  const auto step = [&] {
    const fsdp::ModelLoss loss = model->loss(tokens, tokens);
    loss.total.backward();
    for (at::Tensor& parameter : model->parameters()) parameter.mutable_grad() = at::Tensor();
  };
  step();
  std::vector<double> times;
  for (const double begin = seconds_now(); seconds_now() - begin < seconds || times.empty();) {
    const double before = seconds_now();
    step();
    times.push_back(seconds_now() - before);
  }
  // The best: others share this machine.
  const double best = *std::min_element(times.begin(), times.end());
  const double rate = static_cast<double>(kRows * kSequence) / best;
  std::printf("%-12s %-10s %9.1f ms %9.0f tokens/s %7.2f GFLOP/s\n", preset.name,
              recompute == fsdp::Recompute::kNone ? "" : "recompute", best * 1e3, rate,
              rate * fsdp::flops_per_token(preset.config, kSequence) * 1e-9);
  std::fflush(stdout);
}

}  // namespace

int main(int argc, char** argv) {
  at::set_num_threads(1);
  const double seconds = argc > 1 ? std::stod(argv[1]) : 3.0;
  std::vector<std::string> names(argv + std::min(argc, 2), argv + argc);
  if (names.empty()) names = {"tiny", "moe-tiny", "hybrid-tiny"};
  for (const std::string& name : names) {
    const fsdp::ModelPreset* preset = fsdp::find_preset(name);
    if (preset == nullptr) {
      std::fprintf(stderr, "bench_models: preset '%s' is not known\n", name.c_str());
      return 2;
    }
    measure(*preset, fsdp::Recompute::kNone, seconds);
    measure(*preset, fsdp::Recompute::kBlock, seconds);
  }
  return 0;
}
