#include "fsdp/train/calibration.h"

#include <ATen/ATen.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/headeronly/version.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <memory>
#include <optional>
#include <thread>
#include <utility>

#include "fsdp/base/check.h"
#include "fsdp/base/device_stream.h"
#include "fsdp/base/text.h"
#include "fsdp/base/torch_dtype.h"
#include "fsdp/comm/communicator.h"
#include "fsdp/comm/world.h"
#include "fsdp/nn/language_model.h"
#include "fsdp/nn/layers/matrix_layers.h"
#include "fsdp/plan/load_model.h"
#include "fsdp/plan/model_tensors.h"
#include "fsdp/plan/time_forecast.h"
#include "fsdp/shard/fully_shard.h"
#include "fsdp/shard/parameter_init.h"
#include "fsdp/shard/unit.h"
#include "fsdp/train/environment.h"
#include "fsdp/train/run_options.h"

namespace fsdp::train {

namespace {

using Clock = std::chrono::steady_clock;

constexpr int kWarmUp = 4;  // learns the order of units, and allocates
constexpr size_t kFewestSteps = 5;
constexpr int64_t kFewBlocks = 1;
constexpr int64_t kManyBlocks = 3;

double us_between(Clock::time_point begin, Clock::time_point end) {
  return std::chrono::duration<double, std::micro>(end - begin).count();
}

void synchronize(c10::Device device) {
  if (!device.is_cpu())
    c10::impl::VirtualGuardImpl(device.type()).synchronizeDevice(device.index());
}

// A moment between what was asked for before and after it: on the host, and where it is computed.
class Mark {
 public:
  explicit Mark(c10::Device device) : time_(Clock::now()) {
    if (device.is_cpu()) return;
    event_.emplace(device.type(), c10::EventFlag::BACKEND_DEFAULT);  // one that takes time
    event_->record(current_stream(device));
  }

  double host_us_until(const Mark& later) const { return us_between(time_, later.time_); }
  // The time of a device that is done with both.
  double us_until(const Mark& later) const {
    return event_ ? event_->elapsedTime(*later.event_) * 1e3 : host_us_until(later);
  }

 private:
  Clock::time_point time_;
  std::optional<c10::Event> event_;
};

// Keeps a device busy for so long at least, while its host asks for what follows: no wait for the
// host is measured, and the device's clock is that of a sustained load. Zeros would leave it cool.
void keep_busy(c10::Device device, double us) {
  if (device.is_cpu()) return;
  constexpr int64_t kSize = 8192;
  constexpr double kShortestUs = 400;  // of a product, on GPUs of today
  const at::Tensor matrix = at::randn({kSize, kSize}, at::device(device).dtype(at::kBFloat16));
  for (double asked = 0; asked < us; asked += kShortestUs) static_cast<void>(matrix.matmul(matrix));
}

// Microseconds of the phases of a step.
struct PhaseTimes {
  double forward = 0;
  double backward = 0;
  double update = 0;
  double host = 0;  // to ask for all of it
};

// Whatever else a CPU does can only make a step slower; a device has its own clock.
PhaseTimes typical_of(const std::vector<PhaseTimes>& steps, c10::Device device) {
  PhaseTimes typical;
  for (double PhaseTimes::*phase :
       {&PhaseTimes::forward, &PhaseTimes::backward, &PhaseTimes::update, &PhaseTimes::host}) {
    std::vector<double> times;
    for (const PhaseTimes& step : steps) times.push_back(step.*phase);
    std::ranges::sort(times);
    typical.*phase = times[device.is_cpu() ? 0 : times.size() / 2];
  }
  return typical;
}

ModelConfig with_blocks(ModelConfig config, int64_t blocks) {
  if (auto* llama = std::get_if<LlamaConfig>(&config)) llama->num_hidden_layers = blocks;
  if (auto* mixtral = std::get_if<MixtralConfig>(&config))
    mixtral->decoder.num_hidden_layers = blocks;
  return config;
}

using Collective = void (*)(Communicator& comm, const at::Tensor& whole, const at::Tensor& part);

// Microseconds of its fastest call between threads of this process.
double collective_us(Collective collective, int64_t ranks, int64_t bytes) {
  constexpr int kCalls = 15;
  double best = 0;
  run_threads(static_cast<int>(ranks), {}, [&](World& world) {
    const int64_t numel = bytes / 4 / ranks;
    const at::Tensor whole = at::zeros({numel * ranks});
    const at::Tensor part = at::zeros({numel});
    for (int call = 0; call <= kCalls; ++call) {
      const auto begin = Clock::now();
      collective(world.communicator(), whole, part);
      const double us = us_between(begin, Clock::now());
      // The first call wakes threads.
      if (world.rank() == 0 && call > 0) best = call == 1 ? us : std::min(best, us);
    }
  });
  return best;
}

class Calibration {
 public:
  Calibration(const CalibrationOptions& options, Rates known)
      : options_(options), device_(options.device), rates_(std::move(known)) {}

  Rates run() {
    describe_machine();
    for (const CalibratedRun& run : options_.runs)
      attempt(concat(run.model.name, ", ", run.rows, " x ", run.sequence, " tokens"),
              [&] { measure(run); });
    if (!options_.link_ranks.empty()) attempt("links", [&] { measure_links(); });
    return std::move(rates_);
  }

 private:
  void describe_machine() {
    const std::string host = processor_text();
    const std::string machine = device_.is_cpu() ? host : device_name(device_);
    // Figures of another machine say nothing of this one.
    if (rates_.machine != machine || rates_.threads != options_.threads) rates_ = {};
    rates_.machine = machine;
    rates_.host = host;
    rates_.date = time_text("%Y-%m-%d");
    rates_.torch = TORCH_VERSION;
    rates_.device = device_.is_cpu() ? "cpu" : "cuda";
    rates_.threads = options_.threads;
    rates_.cores = std::thread::hardware_concurrency();
  }

  void attempt(const std::string& what, const std::function<void()>& measuring) const {
    const auto say = [&](const std::string& line) {
      if (options_.progress) options_.progress(line);
    };
    say(what);
    try {
      measuring();
    } catch (const std::exception& error) {
      const std::string text = error.what();
      say(concat("  left out: ", text.substr(0, text.find('\n'))));
    }
    if (!device_.is_cpu()) c10::getDeviceAllocator(device_.type())->emptyCache();
  }

  void measure(const CalibratedRun& run) {
    const std::string shape = shape_text(run.model.config);
    if (shape.empty())
      throw UsageError(concat("the blocks of model '", run.model.name,
                              "' are of several kinds, for which plans have a roofline"));
    const PhaseTimes few = model_times(run, kFewBlocks);
    const PhaseTimes many = model_times(run, kManyBlocks);
    // Something, too, where other work has slowed the few.
    const auto of_block = [&](double PhaseTimes::*phase) {
      constexpr double kLeast = 0.1;
      return std::max((many.*phase - few.*phase) / (kManyBlocks - kFewBlocks),
                      kLeast * many.*phase / kManyBlocks);
    };
    const auto rest = [](double whole, double part) { return std::max(0.0, whole - part); };
    const PassTimes block{of_block(&PhaseTimes::forward), of_block(&PhaseTimes::backward)};
    const PassTimes embedding = embedding_times(run);
    MeasuredParts parts{.shape = shape,
                        .products = products_name(compute_dtype(run.options, device_),
                                                  run.options.shard.quantization.recipe),
                        .rows = run.rows,
                        .sequence = run.sequence,
                        .embedding = embedding,
                        .block = block,
                        // With the loss.
                        .head = {rest(few.forward, block.forward + embedding.forward),
                                 rest(few.backward, block.backward + embedding.backward)},
                        .host_us = device_.is_cpu() ? 0.0 : of_block(&PhaseTimes::host)};
    add_roofline(run, parts, of_block(&PhaseTimes::update), many.update);
    rates_.add(parts);
  }

  // Updates are those of the run's settings, so that each run says more of the machine. Models
  // reach different rates; a plan of one that was not measured takes the best of them.
  void add_roofline(const CalibratedRun& run, MeasuredParts& parts, double block_update_us,
                    double update_us) {
    constexpr double kIterations = 5;
    const auto raise = [](double& rate, double per_second) { rate = std::max(rate, per_second); };
    const Planner planner = planner_of(run, kManyBlocks);
    const Forecast forecast = planner.forecast();
    const PlanOptions& options = forecast.options;
    const auto num_tensors = static_cast<double>(planner.model().units[1].tensors.size());
    const double bytes_per_s = 1e6 * update_bytes(planner.groups(), options.offload) / update_us;
    if (options.muon) {
      const auto num_matrices = static_cast<double>(forecast.matrices.num_matrices) / kManyBlocks;
      parts.muon_flops_per_s =
          1e6 * kIterations * forecast.matrices.mean_flops / kManyBlocks / block_update_us;
      raise(rates_.flops_per_s[concat("muon ", name_of(*options.muon))], parts.muon_flops_per_s);
      // Its requests beside those of blocks with AdamW.
      const double host_us = std::max(0.0, parts.host_us - rates_.host_us_per_tensor * num_tensors);
      rates_.host_us_per_matrix = host_us / num_matrices;
      parts.host_us -= host_us;
    } else if (options.offload > 0) {
      raise(rates_.offload_bytes_per_s, options.offload * bytes_per_s);
    } else {
      raise(rates_.bytes_per_s, bytes_per_s);
      rates_.host_us_per_tensor = parts.host_us / num_tensors;
    }
    if (rates_.bytes_per_s == 0)
      throw UsageError("measure it without --offload and --optimizer muon first");
    raise(rates_.flops_per_s[parts.products],
          reached_flops_per_s(planner.model(), options, {.batch = {run.rows, run.sequence}},
                              parts.block, rates_.bytes_per_s));
  }

  Planner planner_of(const CalibratedRun& run, int64_t blocks) const {
    PlanOptions plan = plan_options(run.options, 1, compute_dtype(run.options, device_));
    plan.outer = plan.ep = plan.tp = 1;
    return {build_model(run.model.name, with_blocks(run.model.config, blocks)), plan};
  }

  PhaseTimes model_times(const CalibratedRun& run, int64_t blocks) const {
    const auto model = [&] {
      const MetaConstruction meta;
      return build_language_model(with_blocks(run.model.config, blocks),
                                  {.dtype = scalar_type_of(compute_dtype(run.options, device_)),
                                   .logit_bytes = run.options.build.logit_bytes});
    }();
    return step_times(run, std::static_pointer_cast<torch::nn::Module>(model),
                      [&](const at::Tensor& tokens) { return model->loss(tokens, tokens).total; });
  }

  // The embedding alone, as a unit.
  PassTimes embedding_times(const CalibratedRun& run) const {
    const std::vector<int64_t> table =
        planner_of(run, kFewBlocks).model().units[0].tensors[0].shape;
    const auto holder = std::make_shared<torch::nn::Module>();
    Unit<nn::Embedding> embedding(table[0], table[1], /*standard_deviation=*/1.0);
    holder->register_module("embedding", embedding);
    holder->to(scalar_type_of(compute_dtype(run.options, device_)));
    CalibratedRun alone = run;
    alone.options.optimizer = OptimizerChoice::kAdamW;
    alone.options.shard.offload.fraction = 0;
    alone.options.shard.quantization.recipe = WeightRecipe::kPlain;
    const PhaseTimes times =
        step_times(alone, holder, [&](const at::Tensor& tokens) { return embedding(tokens); });
    return {times.forward, times.backward};
  }

  // Typical steps of a module on one rank, with the run's settings.
  template <typename Forward>
  PhaseTimes step_times(const CalibratedRun& run, const std::shared_ptr<torch::nn::Module>& module,
                        const Forward& forward) const {
    World world = World::from_environment();
    const Mesh mesh = world.mesh();
    const Sharded sharded = fully_shard(module, mesh, shard_options(run.options, device_));
    const std::unique_ptr<Optimizer> optimizer = make_optimizer(run.options, sharded);
    // Not random ones: the same in every process.
    constexpr int64_t kStride = 7919;  // a prime
    const at::Tensor tokens =
        at::arange(run.rows * run.sequence, at::device(device_).dtype(at::kLong))
            .mul_(kStride)
            .remainder_(vocab_size_of(run.model.config))
            .view({run.rows, run.sequence});
    double slowest_host = 0;
    std::vector<PhaseTimes> steps;
    const auto start = Clock::now();
    for (int64_t i = 0;
         steps.size() < kFewestSteps || us_between(start, Clock::now()) < 1e6 * options_.seconds;
         ++i) {
      keep_busy(device_, 2 * slowest_host);
      const Mark begin(device_);
      const at::Tensor output = forward(tokens);
      const Mark computed(device_);
      output.backward(at::ones_like(output));
      const Mark reduced(device_);
      optimizer->step();
      optimizer->zero_grad();
      const Mark asked(device_);
      optimizer->wait();
      const Mark updated(device_);
      synchronize(device_);
      const double host = begin.host_us_until(asked);
      if (i + 1 >= kWarmUp) slowest_host = std::max(slowest_host, host);
      if (i >= kWarmUp)
        steps.push_back({begin.us_until(computed), computed.us_until(reduced),
                         reduced.us_until(updated), host});
    }
    return typical_of(steps, device_);
  }

  void measure_links() {
    struct Measured {
      const char* name;
      int64_t times_received;  // a side, but for the rank's own part
      Collective call;
    };
    const std::vector<Measured> collectives = {
        {"all_gather", 1,
         [](Communicator& comm, const at::Tensor& whole, const at::Tensor& part) {
           comm.all_gather(whole, part, "rates").wait();
         }},
        {"reduce_scatter", 1,
         [](Communicator& comm, const at::Tensor& whole, const at::Tensor& part) {
           comm.reduce_scatter(part, whole, {}, "rates").wait();
         }},
        {"all_reduce", 2,
         [](Communicator& comm, const at::Tensor& whole, const at::Tensor&) {
           comm.all_reduce(whole, {}, "rates").wait();
         }},
        {"all_to_all", 1, [](Communicator& comm, const at::Tensor& whole, const at::Tensor&) {
           comm.all_to_all(at::empty_like(whole), whole, "rates").wait();
         }}};
    constexpr int64_t kFew = 1 << 10;
    constexpr int64_t kMany = 1 << 22;
    rates_.links.clear();
    for (const Measured& each : collectives)
      for (const int64_t ranks : options_.link_ranks) {
        const double latency = collective_us(each.call, ranks, kFew);
        const double us = std::max(1.0, collective_us(each.call, ranks, kMany) - latency);
        const auto received = static_cast<double>(each.times_received * (kMany - kMany / ranks));
        rates_.links.push_back({each.name, ranks, {1e6 * received / us, latency}});
      }
  }

  const CalibrationOptions& options_;
  const c10::Device device_;
  Rates rates_;
};

}  // namespace

std::vector<CalibratedRun> usual_runs(c10::Device device) {
  const auto run = [](const char* model, int64_t rows, int64_t sequence) {
    CalibratedRun usual{.model = {.name = model, .config = *load_model(model).layers},
                        .options = {},
                        .rows = rows,
                        .sequence = sequence};
    usual.options.shard.precision.main_grads = at::kFloat;
    return usual;
  };
  std::vector<CalibratedRun> runs =
      device.is_cpu() ? std::vector{run("tiny", 4, 64), run("tiny", 4, 64), run("tiny", 4, 64),
                                    run("moe-tiny", 4, 64)}
                      : std::vector{run("llama-1b", 4, 2048),    run("llama-1b", 4, 2048),
                                    run("llama-1b", 4, 2048),    run("llama-1b", 4, 2048),
                                    run("llama-110m", 16, 1024), run("llama3-8b", 2, 4096)};
  runs[1].options.optimizer = OptimizerChoice::kMuon;
  runs[2].options.shard.offload.fraction = 1;
  if (!device.is_cpu()) runs[3].options.shard.quantization.recipe = WeightRecipe::kFp8Row;
  return runs;
}

Rates calibrate(const CalibrationOptions& options, Rates known) {
  return Calibration(options, std::move(known)).run();
}

}  // namespace fsdp::train
