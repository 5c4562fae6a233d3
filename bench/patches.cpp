// bench_patches: bytes and milliseconds of patches after one step, beside all weights and beside
// finding changes by a snapshot.
//
//   bench_patches --model llama-110m
//   bench_patches --model llama-1b --device cuda:0 --batch 4 --sequence 2048
#include <ATen/ATen.h>
#include <torch/utils.h>

#include <CLI/CLI.hpp>
#include <chrono>
#include <cstdio>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "fsdp/base/check.h"
#include "fsdp/base/device_stream.h"
#include "fsdp/base/durable_file.h"
#include "fsdp/checkpoint/patches.h"
#include "fsdp/checkpoint/patches/patch_files.h"
#include "fsdp/comm/world.h"
#include "fsdp/nn/config/presets.h"
#include "fsdp/nn/language_model.h"
#include "fsdp/optim/adamw.h"
#include "fsdp/optim/optimizer_impl.h"
#include "fsdp/shard/engine/engine.h"
#include "fsdp/shard/fully_shard.h"
#include "timings.h"

namespace {

using namespace fsdp;

struct Arguments {
  std::string model = "llama-110m";
  std::string device = "cpu";
  std::string directory = "/tmp";
  std::vector<double> rates = {1e-6, 3e-5, 3e-4};
  int64_t batch = 1;
  int64_t sequence = 128;
  int warmup = 5;  // steps before the first patch: moments are as in the midst of a training
  int rounds = 5;
};

// Milliseconds until everything that `body` starts is done.
double timed_ms(c10::Device device, const std::function<void()>& body) {
  const auto synchronize = [&] {
    if (!device.is_cpu()) current_stream(device).synchronize();
  };
  synchronize();
  const auto begin = std::chrono::steady_clock::now();
  body();
  synchronize();
  return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - begin)
      .count();
}

int64_t bytes_in(const std::string& patch) {
  int64_t bytes = 0;
  for (const StoredFile& file : read_patch_record(patch).files) bytes += file.bytes;
  return bytes;
}

// This rank's weights as they compute.
std::vector<at::Tensor> weights_of(const Sharded& sharded) {
  std::vector<at::Tensor> weights;
  for (const auto& unit : EngineAccess::of(sharded).units())
    for (const ParamGroup& group : unit->groups())
      for (const MainWeightPiece& piece : group.main_weights().pieces())
        weights.push_back(piece.weight);
  return weights;
}

struct Figures {
  std::vector<double> take_there, take, write, full, keep, compare;  // milliseconds
  int64_t changed = 0;
  int64_t all = 0;
  int64_t bytes = 0;
  int64_t full_bytes = 0;
};

Figures measure(const Arguments& given, double rate, World& world) {
  const ModelPreset* preset = find_preset(given.model);
  if (preset == nullptr)
    throw UsageError(
        concat("--model is '", given.model, "'; use one of ", join(preset_names(), ", ")));
  const c10::Device device(given.device);
  const Mesh mesh = world.mesh({});
  const std::shared_ptr<LanguageModel> model =
      build_language_model(preset->config, {.seed = 1, .dtype = at::kBFloat16});
  model->to(device);
  const Sharded sharded = fully_shard(std::static_pointer_cast<torch::nn::Module>(model), mesh,
                                      {.precision = {.main_params = at::kFloat}, .device = device});
  AdamW optimizer(sharded,
                  {.lr = rate, .beta2 = 0.95, .step = {.max_norm = 1.0, .marks_changes = true}});
  const auto train = [&] {
    const at::Tensor tokens =
        at::randint(0, 256, {given.batch, given.sequence + 1}, at::device(device).dtype(at::kLong));
    model->loss(tokens.narrow(1, 0, given.sequence), tokens.narrow(1, 1, given.sequence), {})
        .total.backward();
    optimizer.step();
    optimizer.zero_grad();
    optimizer.wait();
  };
  for (int step = 0; step < given.warmup; ++step) train();

  const CheckpointState state{.sharded = sharded, .optimizer = &optimizer};
  const std::string directory = concat(given.directory, "/bench_patches");
  remove_tree(directory);
  PatchStream stream(state);
  Figures figures;
  int64_t step = 0;
  std::string path;
  figures.full.push_back(timed_ms(device, [&] { path = stream.write(directory, step++); }));
  figures.full_bytes = bytes_in(path);
  for (int round = 0; round < given.rounds; ++round) {
    std::vector<at::Tensor> snapshot;
    figures.keep.push_back(timed_ms(device, [&] {
      for (const at::Tensor& weight : weights_of(sharded)) snapshot.push_back(weight.clone());
    }));
    train();
    int64_t found = 0;
    figures.compare.push_back(timed_ms(device, [&] {
      size_t i = 0;
      for (const at::Tensor& weight : weights_of(sharded)) {
        const at::Tensor positions = weight.ne(snapshot[i++]).nonzero().view({-1});
        found += weight.index_select(0, positions).numel();
      }
    }));
    snapshot.clear();
    figures.write.push_back(timed_ms(device, [&] { path = stream.write(directory, step++); }));
    figures.bytes = bytes_in(path);
    Patch patch;
    train();
    figures.take_there.push_back(timed_ms(device, [&] { patch = stream.take(step++, device); }));
    train();
    patch = {};
    figures.take.push_back(timed_ms(device, [&] { patch = stream.take(step++); }));
    figures.changed = found;
  }
  for (const at::Tensor& weight : weights_of(sharded)) figures.all += weight.numel();
  remove_tree(directory);
  return figures;
}

void print(const Figures& figures, double rate) {
  const auto mb = [](int64_t bytes) { return static_cast<double>(bytes) / 1e6; };
  std::printf("%-8.0e %8.3f %% %10.2f %10.2f %9.1f %9.1f %9.1f %9.1f %9.1f %9.1f\n", rate,
              100.0 * static_cast<double>(figures.changed) / static_cast<double>(figures.all),
              mb(figures.bytes), mb(figures.full_bytes), bench::median(figures.take_there),
              bench::median(figures.take), bench::median(figures.write),
              bench::median(figures.full), bench::median(figures.keep),
              bench::median(figures.compare));
}

}  // namespace

int main(int argc, char** argv) try {
  Arguments given;
  CLI::App app{"What patches of weights take, beside all weights and beside snapshots",
               "bench_patches"};
  app.add_option("--model", given.model, "a preset");
  app.add_option("--device", given.device, "cpu, or a GPU such as cuda:0");
  app.add_option("--directory", given.directory, "where patches are written");
  app.add_option("--rates", given.rates, "learning rates");
  app.add_option("--batch", given.batch, "sequences");
  app.add_option("--sequence", given.sequence, "tokens");
  app.add_option("--warmup", given.warmup, "steps before the first patch");
  app.add_option("--rounds", given.rounds, "of which the median is shown");
  CLI11_PARSE(app, argc, argv);
  std::printf("# %s on %s, %lld x %lld tokens, after %d steps; milliseconds are medians of %d\n",
              given.model.c_str(), given.device.c_str(), static_cast<long long>(given.batch),
              static_cast<long long>(given.sequence), given.warmup, given.rounds);
  std::printf(
      "# rate    changed    patch MB    full MB  there ms   take ms  write ms   full ms   copy ms"
      "  compare ms\n"
      "# there: tensors on the device; take: on the host; copy, compare: a snapshot on the "
      "device\n");
  std::fflush(stdout);
  World world = World::from_environment();
  for (const double rate : given.rates) {
    print(measure(given, rate, world), rate);
    std::fflush(stdout);  // a run may take long
  }
  return 0;
} catch (const std::exception& error) {
  std::fprintf(stderr, "bench_patches: %s\n", error.what());
  return 1;
}
