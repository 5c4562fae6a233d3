#include "fsdp/train/calibration/measured_steps.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <functional>
#include <memory>
#include <utility>

#include "fsdp/comm/communicator.h"
#include "fsdp/comm/world.h"
#include "fsdp/nn/language_model.h"
#include "fsdp/optim/adamw.h"
#include "fsdp/optim/muon.h"
#include "fsdp/shard/fully_shard.h"
#include "fsdp/shard/parameter_init.h"
#include "fsdp/train/calibration/call_timer.h"

namespace fsdp::train {

namespace {

using Clock = std::chrono::steady_clock;

double us_since(Clock::time_point begin) {
  return std::chrono::duration<double, std::micro>(Clock::now() - begin).count();
}

constexpr int kWarmUp = 5;  // learns the order of units
constexpr int kSteps = 15;
constexpr int64_t kTokens = 16;
constexpr int64_t kVocabularyOfSteps = 256;

LlamaConfig narrow_llama(int64_t layers) {
  return {.vocab_size = kVocabularyOfSteps,
          .hidden_size = 128,
          .num_hidden_layers = layers,
          .num_attention_heads = 2,
          .num_key_value_heads = 1,
          .intermediate_size = 256};
}

ModelConfig llama_step(int64_t layers) { return narrow_llama(layers); }

ModelConfig experts_step(int64_t layers) {
  return MixtralConfig{.decoder = narrow_llama(layers), .num_local_experts = 4};
}

// One rank's model and optimizer, with the options of a run.
class TrainedAlone {
 public:
  TrainedAlone(const WorkPlace& place, const ModelConfig& config, const ShardOptions& options)
      : place_(place), mesh_(world_.mesh()), model_([&] {
          const MetaConstruction meta;
          return build_language_model(config, {.seed = 1, .dtype = place.dtype});
        }()) {
    ShardOptions all = options;
    all.device = place.device;
    all.precision.main_grads = at::kFloat;
    const Sharded sharded =
        fully_shard(std::static_pointer_cast<torch::nn::Module>(model_), mesh_, all);
    const StepOptions step{.max_norm = 1.0, .measures_norm = true};
    if (all.matrices.declared)
      optimizer_ = std::make_unique<Muon>(sharded, MuonOptions{.lr = 1e-4, .step = step});
    else
      optimizer_ = std::make_unique<AdamW>(sharded, AdamWOptions{.lr = 1e-4, .step = step});
    tokens_ = some_tokens(kTokens, kVocabularyOfSteps, place).unsqueeze(0);
  }

  // As TrainingRun does it: the host looks at the loss and the norm of every step.
  void step() {
    const at::Tensor loss = forward_and_backward();
    optimizer_->step();
    optimizer_->zero_grad();
    model_->end_step(mesh_);
    loss.to(at::kCPU);
    optimizer_->state();
  }

  // Microseconds until all weights are updated, with nothing beside it.
  double update_us() {
    forward_and_backward();
    synchronize(place_.device);
    const auto begin = Clock::now();
    optimizer_->step();
    optimizer_->wait();
    synchronize(place_.device);
    const double us = us_since(begin);
    optimizer_->zero_grad();
    return us;
  }

  int64_t num_parameters() const {
    int64_t numel = 0;
    for (const at::Tensor& parameter : model_->parameters()) numel += parameter.numel();
    return numel;
  }

 private:
  at::Tensor forward_and_backward() {
    const at::Tensor loss = model_->loss(tokens_, tokens_).total;
    loss.backward();
    return loss.detach();
  }

  const WorkPlace place_;
  World world_ = World::from_environment();
  const Mesh mesh_;
  const std::shared_ptr<LanguageModel> model_;
  std::unique_ptr<Optimizer> optimizer_;
  at::Tensor tokens_;
};

// Of a CPU the fastest, as CallTimer does; a GPU's host is measured with all that slows it.
double typical_of(std::vector<double> times, const WorkPlace& place) {
  std::sort(times.begin(), times.end());
  return times[place.device.is_cpu() ? 0 : times.size() / 2];
}

double host_step_us(const WorkPlace& place, const HostStep& kind, int64_t layers) {
  ShardOptions options;
  options.matrices.declared = kind.has_muon;
  TrainedAlone run(place, kind.config(layers), options);
  std::vector<double> times;
  for (int i = 0; i < kWarmUp + kSteps; ++i) {
    const auto begin = Clock::now();
    run.step();
    if (i >= kWarmUp) times.push_back(us_since(begin));
  }
  return typical_of(std::move(times), place);
}

// Nearly all of it is a table and a head.
LlamaConfig wide_llama(int64_t elements) {
  LlamaConfig config = narrow_llama(1);
  config.vocab_size = std::max(kVocabularyOfSteps, elements / 2 / config.hidden_size);
  return config;
}

}  // namespace

std::span<const HostStep> host_steps() {
  static constexpr std::array<HostStep, 3> kKinds = {{{"host step", llama_step, false},
                                                      {"host step experts", experts_step, false},
                                                      {"host step muon", llama_step, true}}};
  return kKinds;
}

RateGrid measure_host_steps(const WorkPlace& place, const HostStep& kind,
                            const std::vector<int64_t>& layers) {
  RateGrid grid{.work = kind.work, .axes = {"layers"}, .points = {layers}, .us = {}};
  for (const int64_t each : layers) grid.us.push_back(host_step_us(place, kind, each));
  return grid;
}

RateGrid measure_offloaded_updates(const WorkPlace& place, const std::vector<int64_t>& elements) {
  constexpr int kUpdates = 5;
  RateGrid grid{.work = "offloaded update", .axes = {"elements"}, .points = {{}}, .us = {}};
  for (const int64_t each : elements) {
    ShardOptions options;
    options.offload.fraction = 1.0;
    TrainedAlone run(place, wide_llama(each), options);
    run.update_us();  // the first one touches memory
    std::vector<double> times;
    for (int i = 0; i < kUpdates; ++i) times.push_back(run.update_us());
    grid.points[0].push_back(run.num_parameters());
    grid.us.push_back(typical_of(std::move(times), place));
  }
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
      {"all_reduce", [](Communicator& comm, const at::Tensor& whole,
                        const at::Tensor&) { comm.all_reduce(whole, {}, "rates").wait(); }},
      {"all_to_all", [](Communicator& comm, const at::Tensor& whole, const at::Tensor&) {
         comm.all_to_all(at::empty_like(whole), whole, "rates").wait();
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
