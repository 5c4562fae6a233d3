#include "fsdp/train/calibration/measured_steps.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <chrono>
#include <functional>
#include <memory>
#include <optional>

#include "fsdp/comm/communicator.h"
#include "fsdp/comm/world.h"
#include "fsdp/graph/graph.h"
#include "fsdp/nn/language_model.h"
#include "fsdp/optim/adamw.h"
#include "fsdp/plan/reference_step.h"
#include "fsdp/shard/fully_shard.h"
#include "fsdp/shard/parameter_init.h"
#include "fsdp/train/calibration/call_timer.h"

namespace fsdp::train {

namespace {

using Clock = std::chrono::steady_clock;

double us_since(Clock::time_point begin) {
  return std::chrono::duration<double, std::micro>(Clock::now() - begin).count();
}

constexpr int kWarmUp = 5;  // learns the order of units, and records

// The reference model with so many layers, and its optimizer.
class ReferenceTrainee {
 public:
  ReferenceTrainee(const WorkPlace& place, int64_t layers, StepLaunch launch)
      : launch_(launch), world_(World::from_environment()), mesh_(world_.mesh()) {
    LlamaConfig config = reference_step(place.device.is_cpu()).model;
    config.num_hidden_layers = layers;
    {
      const MetaConstruction meta;
      model_ = build_language_model(config, {.seed = 1, .dtype = place.dtype});
    }
    ShardOptions options;
    options.precision.main_params = at::kFloat;
    options.precision.main_grads = at::kFloat;
    options.device = place.device;
    sharded_.emplace(
        fully_shard(std::static_pointer_cast<torch::nn::Module>(model_), mesh_, options));
    optimizer_ = std::make_unique<AdamW>(*sharded_, AdamWOptions{.lr = 1e-4});
  }

  void step(const at::Tensor& tokens) {
    if (launch_ == StepLaunch::kEager) return train(tokens);
    if (!graph_)
      graph_ =
          std::make_unique<Graph>(*sharded_, optimizer_.get(), [this, tokens] { train(tokens); });
    graph_->run();
  }
  void finish() const { optimizer_->wait(); }

 private:
  void train(const at::Tensor& tokens) {
    model_->loss(tokens, tokens).total.backward();
    optimizer_->step();
    optimizer_->zero_grad();
  }

  const StepLaunch launch_;
  World world_;
  const Mesh mesh_;
  std::shared_ptr<LanguageModel> model_;
  std::optional<Sharded> sharded_;
  std::unique_ptr<AdamW> optimizer_;
  std::unique_ptr<Graph> graph_;
};

// The fastest of several steps that follow each other, as in a run; on a GPU the mean of them.
double step_us(const WorkPlace& place, int64_t layers, int64_t num_tokens, int64_t sequence,
               StepLaunch launch, int steps) {
  ReferenceTrainee trainee(place, layers, launch);
  const int64_t columns = std::min(num_tokens, sequence);
  const at::Tensor tokens =
      at::randint(256, {num_tokens / columns, columns}, at::device(place.device).dtype(at::kLong));
  for (int i = 0; i < kWarmUp; ++i) trainee.step(tokens);
  trainee.finish();
  synchronize(place.device);
  double best = 0.0;
  const auto begin = Clock::now();
  for (int i = 0; i < steps; ++i) {
    const auto start = Clock::now();
    trainee.step(tokens);
    if (place.device.is_cpu()) trainee.finish();
    best = i == 0 ? us_since(start) : std::min(best, us_since(start));
  }
  trainee.finish();
  synchronize(place.device);
  return place.device.is_cpu() ? best : us_since(begin) / steps;
}

}  // namespace

RateGrid measure_steps(const WorkPlace& place, const StepPoints& points, StepLaunch launch) {
  const ReferenceStep reference = reference_step(place.device.is_cpu());
  std::vector<int64_t> tokens = {reference.few_tokens};
  for (const int64_t sequences : points.sequences) tokens.push_back(sequences * reference.sequence);
  RateGrid grid{.work = launch == StepLaunch::kEager ? "step" : "recorded step",
                .axes = {"layers", "tokens"},
                .points = {points.layers, tokens},
                .us = {}};
  for (const int64_t layers : points.layers)
    for (const int64_t num_tokens : tokens)
      grid.us.push_back(
          step_us(place, layers, num_tokens, reference.sequence, launch, points.steps));
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
