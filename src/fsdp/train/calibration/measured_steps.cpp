#include "fsdp/train/calibration/measured_steps.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <chrono>
#include <functional>
#include <memory>
#include <optional>

#include "fsdp/comm/communicator.h"
#include "fsdp/comm/world.h"
#include "fsdp/nn/language_model.h"
#include "fsdp/optim/adamw.h"
#include "fsdp/shard/fully_shard.h"
#include "fsdp/shard/parameter_init.h"
#include "fsdp/train/calibration/call_timer.h"

namespace fsdp::train {

namespace {

using Clock = std::chrono::steady_clock;

double us_since(Clock::time_point begin) {
  return std::chrono::duration<double, std::micro>(Clock::now() - begin).count();
}

constexpr int kWarmUp = 3;  // learns the order of units
constexpr int kSteps = 10;
constexpr int64_t kTokens = 16;

LlamaConfig narrow_llama(int64_t layers) {
  return {.vocab_size = 256,
          .hidden_size = 128,
          .num_hidden_layers = layers,
          .num_attention_heads = 2,
          .num_key_value_heads = 1,
          .intermediate_size = 256};
}

double host_step_us(const WorkPlace& place, int64_t layers) {
  World world = World::from_environment();
  const Mesh mesh = world.mesh();
  const std::shared_ptr<LanguageModel> model = [&] {
    const MetaConstruction meta;
    return build_language_model(narrow_llama(layers), {.seed = 1, .dtype = place.dtype});
  }();
  ShardOptions options;
  options.device = place.device;
  const Sharded sharded =
      fully_shard(std::static_pointer_cast<torch::nn::Module>(model), mesh, options);
  AdamW optimizer(sharded, AdamWOptions{.lr = 1e-4});
  const at::Tensor tokens = some_tokens(kTokens, /*vocabulary=*/256, place).unsqueeze(0);
  Clock::time_point begin;
  for (int i = 0; i < kWarmUp + kSteps; ++i) {
    if (i == kWarmUp) {
      synchronize(place.device);
      begin = Clock::now();
    }
    model->loss(tokens, tokens).total.backward();
    optimizer.step();
    optimizer.zero_grad();
  }
  optimizer.wait();
  synchronize(place.device);
  return us_since(begin) / kSteps;
}

}  // namespace

RateGrid measure_host_steps(const WorkPlace& place, const std::vector<int64_t>& layers) {
  RateGrid grid{.work = "host step", .axes = {"layers"}, .points = {layers}, .us = {}};
  for (const int64_t each : layers) grid.us.push_back(host_step_us(place, each));
  return grid;
}

std::vector<RateGrid> measure_links(const LinkPoints& points) {
  using Collective =
      std::function<void(Communicator&, const at::Tensor& whole, const at::Tensor& part)>;
  const std::vector<std::pair<const char*, Collective>> collectives = {
      {"all_gather", [](Communicator& comm, const at::Tensor& whole,
                        const at::Tensor& part) { comm.all_gather(whole, part, "rates").wait(); }},
      {"reduce_scatter",
       [](Communicator& comm, const at::Tensor& whole, const at::Tensor& part) {
         comm.reduce_scatter(part, whole, {}, "rates").wait();
       }},
      {"all_reduce", [](Communicator& comm, const at::Tensor& whole, const at::Tensor&) {
         comm.all_reduce(whole, {}, "rates").wait();
       }}};
  constexpr int kCalls = 15;
  std::vector<RateGrid> grids;
  for (const auto& [name, collective] : collectives)
    grids.push_back({.work = name,
                     .axes = {"ranks", "bytes"},
                     .points = {points.ranks, points.bytes},
                     .us = {}});
  for (size_t i = 0; i < grids.size(); ++i)
    for (const int64_t ranks : points.ranks)
      for (const int64_t bytes : points.bytes) {
        double best = 0.0;
        run_threads(static_cast<int>(ranks), {}, [&](World& world) {
          const int64_t part_numel = std::max<int64_t>(1, bytes / 4 / ranks);
          const at::Tensor whole = at::zeros({part_numel * ranks});
          const at::Tensor part = at::zeros({part_numel});
          for (int call = 0; call <= kCalls; ++call) {
            const auto begin = Clock::now();
            collectives[i].second(world.communicator(), whole, part);
            // The first call wakes threads.
            if (world.rank() == 0 && call > 0)
              best = call == 1 ? us_since(begin) : std::min(best, us_since(begin));
          }
        });
        grids[i].us.push_back(best);
      }
  return grids;
}

}  // namespace fsdp::train
