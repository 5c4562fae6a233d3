// The cost of sharding: host time per unit, a training step beside the same model unsharded, and
// what a narrow wire type gains on a slow network. bench/engine.py adds PyTorch FSDP2.
#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include <CLI/CLI.hpp>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <mutex>
#include <string>
#include <vector>

#include "fsdp/base/check.h"
#include "fsdp/fsdp.h"
#include "llama.h"
#include "turns.h"

namespace {

using bench::Contender;
using bench::Timings;
using bench::Turns;

constexpr double kLearningRate = 0.05;

struct Settings {
  int ranks = 2;
  int units = 100;
  int rounds = 5;
  bool every_case = false;
  bench::LlamaShape llama;
};

// Ranks of one thread each. The setting belongs to the thread that makes it.
void run_ranks(int ranks, const fsdp::CommOptions& options,
               const std::function<void(fsdp::World&)>& body) {
  fsdp::run_threads(ranks, options, [&](fsdp::World& world) {
    at::set_num_threads(1);
    body(world);
  });
}

// --- host cost -----------------------------------------------------------------------------------

// Nothing to compute: one product per parameter.
struct ScaleImpl : torch::nn::Module {
  explicit ScaleImpl(int num_parameters) {
    for (int i = 0; i < num_parameters; ++i)
      scales.push_back(register_parameter("scale" + std::to_string(i), at::ones({8})));
  }
  at::Tensor forward(const at::Tensor& x) {
    at::Tensor y = x;
    for (const at::Tensor& scale : scales) y = y * scale;
    return y;
  }
  std::vector<at::Tensor> scales;
};
TORCH_MODULE(Scale);

struct ScaleStackImpl : torch::nn::Module {
  ScaleStackImpl(int num_units, int num_parameters) {
    for (int i = 0; i < num_units; ++i)
      units.push_back(
          register_module("unit" + std::to_string(i), fsdp::Unit<Scale>(num_parameters)));
  }
  at::Tensor forward(at::Tensor x) {
    for (fsdp::Unit<Scale>& unit : units) x = unit(x);
    return x;
  }
  std::vector<fsdp::Unit<Scale>> units;
};
TORCH_MODULE(ScaleStack);

struct HostCost {
  int ranks = 1;
  int parameters = 1;  // per unit
  double plain_us = 0;
  double sharded_us = 0;
  double cost_us = 0;  // per unit and step
};

HostCost host_cost(const Settings& settings, int ranks, int parameters) {
  HostCost cost{.ranks = ranks, .parameters = parameters};
  run_ranks(ranks, {}, [&](fsdp::World& world) {
    const fsdp::Mesh mesh = world.mesh();
    ScaleStack plain(settings.units, parameters);
    ScaleStack model(settings.units, parameters);
    const fsdp::Sharded sharded = fsdp::fully_shard(model, mesh);
    const at::Tensor x = at::ones({8});
    const std::vector<Contender> contenders = {
        {"plain",
         [&] {
           plain(x).sum().backward();
           plain->zero_grad();
         }},
        {"sharded",
         [&] {
           model(x).sum().backward();
           sharded.refresh_weights();
           sharded.zero_grad();
         }},
    };
    bench::take_turns(world, contenders, {.rounds = 1, .steps = 5});  // records the order
    const Timings times =
        bench::take_turns(world, contenders, {.rounds = 10 * settings.rounds, .steps = 1});
    model(x).sum().backward();
    for (const fsdp::ShardedParameter& parameter : sharded.parameters())
      FSDP_CHECK((parameter.gradient == 1).all().item<bool>(), "gradient of ", parameter.name,
                 " is wrong");
    if (world.rank() != 0) return;
    cost.plain_us = times.best_us(0);
    cost.sharded_us = times.best_us(1);
    cost.cost_us = (cost.sharded_us - cost.plain_us) / settings.units;
  });
  return cost;
}

// --- a training step -----------------------------------------------------------------------------

// One rank's model and data. The update is plain SGD, written out, in both.
class Trainee {
 public:
  Trainee(const bench::LlamaShape& shape, int rank) : model_(build(shape)) {
    at::Generator generator = at::detail::createCPUGenerator(static_cast<uint64_t>(rank));
    const at::Tensor text = at::randint(shape.vocab, {shape.batch, shape.sequence + 1}, generator,
                                        at::TensorOptions().dtype(at::kLong));
    tokens_ = text.narrow(1, 0, shape.sequence).contiguous();
    next_ = text.narrow(1, 1, shape.sequence).contiguous();
  }
  Trainee(const bench::LlamaShape& shape, int rank, const fsdp::Mesh& mesh,
          const fsdp::ShardOptions& options)
      : Trainee(shape, rank) {
    sharded_.emplace(fsdp::fully_shard(model_, mesh, options));
  }

  void step() {
    compute();
    if (sharded_) {
      for (const fsdp::FlatShard& shard : sharded_->flat_shards())
        shard.main_weight.sub_(shard.gradient, kLearningRate);
      sharded_->refresh_weights();
    } else {
      const at::NoGradGuard no_grad;
      for (at::Tensor& parameter : model_->parameters())
        parameter.sub_(parameter.grad(), kLearningRate);
    }
    zero_grad();
  }

  // A step without the update.
  void step_without_update() {
    compute();
    if (sharded_) sharded_->refresh_weights();
    zero_grad();
  }

  double loss() const { return loss_.item<double>(); }

 private:
  // Builds equal values on every rank and in every trainee; the generator belongs to all threads.
  static bench::Llama build(const bench::LlamaShape& shape) {
    static std::mutex seed;
    const std::lock_guard lock(seed);
    at::manual_seed(7);
    return bench::Llama(shape);
  }

  void compute() {
    const at::Tensor loss = model_->forward(tokens_, next_);
    loss.backward();
    loss_ = loss.detach();
  }

  void zero_grad() {
    if (sharded_) {
      sharded_->zero_grad();
    } else {
      model_->zero_grad();
    }
  }

  bench::Llama model_;
  std::optional<fsdp::Sharded> sharded_;
  at::Tensor tokens_;
  at::Tensor next_;
  at::Tensor loss_;
};

// The first loss does not depend on sharding.
void check_first_loss(Trainee& plain, Trainee& sharded, const std::string& name) {
  plain.step_without_update();
  sharded.step_without_update();
  FSDP_CHECK(std::abs(plain.loss() - sharded.loss()) < 1e-5, "the first loss of ", name, " is ",
             sharded.loss(), " and of the plain model ", plain.loss());
}

struct TaxRow {
  std::string name;
  double ms = 0;
  double over_plain = 1.0;
};

struct TaxCase {
  std::string name;
  fsdp::ShardOptions options;
};

std::vector<TaxCase> tax_cases(const Settings& settings) {
  using fsdp::PoolKind;
  using fsdp::Strategy;
  std::vector<TaxCase> cases = {{"optim_grads_params, max_pool", {}},
                                {"optim_grads", {.strategy = Strategy::optim_grads}},
                                {"no_shard", {.strategy = Strategy::no_shard}}};
  if (!settings.every_case) return cases;
  cases.push_back({"optim", {.strategy = Strategy::optim}});
  for (const PoolKind pool : {PoolKind::kOnDemand, PoolKind::kDoubleBuffer, PoolKind::kPlanned})
    cases.push_back({fsdp::concat("optim_grads_params, ", name_of(pool)), {.pool = pool}});
  return cases;
}

std::vector<TaxRow> cpu_tax(const Settings& settings) {
  std::vector<TaxRow> rows;
  run_ranks(settings.ranks, {}, [&](fsdp::World& world) {
    const fsdp::Mesh mesh = world.mesh();
    std::vector<std::unique_ptr<Trainee>> trainees;
    std::vector<Contender> contenders;
    const auto add = [&](const std::string& name, std::unique_ptr<Trainee> trainee) {
      contenders.push_back({name, [t = trainee.get()] { t->step(); }});
      trainees.push_back(std::move(trainee));
    };
    add("plain", std::make_unique<Trainee>(settings.llama, world.rank()));
    for (const TaxCase& each : tax_cases(settings)) {
      add(each.name, std::make_unique<Trainee>(settings.llama, world.rank(), mesh, each.options));
      check_first_loss(*trainees[0], *trainees.back(), each.name);
    }
    const size_t num_steps = contenders.size();
    for (const size_t which : {0, 1})
      contenders.push_back({contenders[which].name + ", no update",
                            [t = trainees[which].get()] { t->step_without_update(); }});
    bench::take_turns(world, contenders, {.rounds = 1, .steps = 2});  // records the order
    const Timings times = bench::take_turns(world, contenders, {settings.rounds, 1});
    for (const auto& trainee : trainees) trainee->step_without_update();
    for (size_t i = 2; i < trainees.size(); ++i)
      FSDP_CHECK(std::abs(trainees[i]->loss() - trainees[1]->loss()) < 1e-2, "after ",
                 settings.rounds, " steps the loss of ", contenders[i].name, " is ",
                 trainees[i]->loss(), " and that of ", contenders[1].name, " ",
                 trainees[1]->loss());
    if (world.rank() != 0) return;
    for (size_t i = 0; i < contenders.size(); ++i)
      rows.push_back({contenders[i].name, times.median_us(i) * 1e-3,
                      times.median_ratio(i, i < num_steps ? 0 : num_steps)});
  });
  return rows;
}

// --- a narrow wire on a slow network -------------------------------------------------------------

// The bytes that one rank receives in a step with fp32 on the wire, counted in a world that moves
// nothing.
int64_t received_bytes(const Settings& settings, const fsdp::Strategy& strategy, int outer) {
  const auto recording = std::make_shared<fsdp::Recording>();
  fsdp::World world = fsdp::World::simulated(0, settings.ranks, recording);
  const fsdp::Mesh mesh = world.mesh({.outer = outer});
  Trainee trainee(settings.llama, 0, mesh, {.strategy = strategy});
  trainee.step();
  trainee.step();
  recording->clear();
  trainee.step();
  int64_t bytes = 0;
  for (const fsdp::RecordedCall& call : *recording) {
    const int64_t received = call.print.bytes * (call.ranks - 1) / call.ranks;
    bytes += call.print.kind == fsdp::OpKind::kAllReduce ? 2 * received : received;
  }
  return bytes;
}

struct WireRow {
  std::string strategy;
  int outer = 1;         // of the ranks, along the outer axis
  double bandwidth = 0;  // bytes per second
  double plain_ms = 0;
  double fp32_ms = 0;
  double bf16_ms = 0;
  double gain = 0;  // fp32 / bf16
};

WireRow wire_gain(const Settings& settings, const fsdp::Strategy& strategy, int outer,
                  double plain_us) {
  WireRow row{.strategy = std::string(strategy.name), .outer = outer};
  row.bandwidth =
      static_cast<double>(received_bytes(settings, strategy, outer)) / (plain_us * 1e-6);
  const fsdp::CommOptions network{.bandwidth_bytes_per_s = row.bandwidth};
  run_ranks(settings.ranks, network, [&](fsdp::World& world) {
    const fsdp::Mesh mesh = world.mesh({.outer = outer});
    Trainee plain(settings.llama, world.rank());
    Trainee fp32(settings.llama, world.rank(), mesh, {.strategy = strategy});
    Trainee bf16(settings.llama, world.rank(), mesh,
                 {.strategy = strategy, .precision = {.grad_comm = at::kBFloat16}});
    check_first_loss(plain, bf16, "a bf16 wire");
    const std::vector<Contender> contenders = {{"plain", [&] { plain.step(); }},
                                               {"fp32", [&] { fp32.step(); }},
                                               {"bf16", [&] { bf16.step(); }}};
    bench::take_turns(world, contenders, {.rounds = 1, .steps = 2});
    const Timings times = bench::take_turns(world, contenders, {settings.rounds, 1});
    FSDP_CHECK(std::abs(fp32.loss() - bf16.loss()) < 0.05, "the loss with a bf16 wire is ",
               bf16.loss(), " and with fp32 ", fp32.loss());
    if (world.rank() != 0) return;
    row.plain_ms = times.median_us(0) * 1e-3;
    row.fp32_ms = times.median_us(1) * 1e-3;
    row.bf16_ms = times.median_us(2) * 1e-3;
    row.gain = times.median_ratio(1, 2);
  });
  return row;
}

double plain_step_us(const Settings& settings) {
  double us = 0;
  run_ranks(settings.ranks, {}, [&](fsdp::World& world) {
    Trainee plain(settings.llama, world.rank());
    plain.step();
    const Timings times =
        bench::take_turns(world, {{"plain", [&] { plain.step(); }}}, {settings.rounds, 1});
    if (world.rank() == 0) us = times.median_us(0);
  });
  return us;
}

// --- reports -------------------------------------------------------------------------------------

struct Results {
  std::vector<HostCost> host;
  std::vector<TaxRow> tax;
  std::vector<WireRow> wire;
};

Results measure(const Settings& settings, const std::string& part) {
  Results results;
  const bool all = part == "all";
  if (all || part == "host")
    for (const int ranks : {1, settings.ranks})
      for (const int parameters : {1, 10})
        results.host.push_back(host_cost(settings, ranks, parameters));
  if (all || part == "tax") results.tax = cpu_tax(settings);
  if (all || part == "wire") {
    const double plain_us = plain_step_us(settings);
    std::vector<fsdp::Strategy> strategies = {fsdp::Strategy::no_shard,
                                              fsdp::Strategy::optim_grads_params};
    if (settings.every_case)
      strategies.insert(strategies.begin() + 1,
                        {fsdp::Strategy::optim, fsdp::Strategy::optim_grads});
    for (const fsdp::Strategy& strategy : strategies)
      results.wire.push_back(wire_gain(settings, strategy, /*outer=*/1, plain_us));
    // Reductions that a cycle ends with, and casts before them.
    for (const char* strategy : {"optim_grads_params", "optim_grads_params+hfsdp"})
      results.wire.push_back(
          wire_gain(settings, fsdp::parse_strategy(strategy), settings.ranks, plain_us));
  }
  return results;
}

void print(const Settings& settings, const Results& results) {
  if (!results.host.empty()) {
    std::printf(
        "# host cost of sharding: %d units with one product per parameter; forward, backward, "
        "refresh_weights, zero_grad; best of %d\n",
        settings.units, 10 * settings.rounds);
    std::printf("%-8s %18s %14s %14s %18s\n", "# ranks", "parameters / unit", "plain us",
                "sharded us", "cost us / unit");
    for (const HostCost& row : results.host)
      std::printf("%-8d %18d %14.0f %14.0f %18.1f\n", row.ranks, row.parameters, row.plain_us,
                  row.sharded_us, row.cost_us);
  }
  if (!results.tax.empty()) {
    std::printf(
        "# a training step (forward, backward, SGD), 7M-parameter fp32 Llama, %d ranks of one "
        "thread; plain: every rank for itself, at the same time\n",
        settings.ranks);
    std::printf("%-42s %10s %12s\n", "# what", "ms", "/ plain");
    for (const TaxRow& row : results.tax)
      std::printf("%-42s %10.2f %12.3f\n", row.name.c_str(), row.ms, row.over_plain);
  }
  if (!results.wire.empty()) {
    std::printf(
        "# the same on a network on which its fp32 communication takes as long as a plain step\n");
    std::printf("%-26s %6s %10s %10s %14s %14s %12s\n", "# strategy", "outer", "MB/s", "plain ms",
                "fp32 wire ms", "bf16 wire ms", "fp32 / bf16");
    for (const WireRow& row : results.wire)
      std::printf("%-26s %6d %10.1f %10.2f %14.2f %14.2f %12.3f\n", row.strategy.c_str(), row.outer,
                  row.bandwidth * 1e-6, row.plain_ms, row.fp32_ms, row.bf16_ms, row.gain);
  }
  std::puts("# result: OK");
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app{"What sharding costs, beside the same models unsharded", "bench_engine"};
  Settings settings;
  std::string part = "all";
  app.add_option("--part", part, "host, tax, wire or all")
      ->check(CLI::IsMember({"host", "tax", "wire", "all"}));
  app.add_option("--ranks", settings.ranks, "ranks, each a thread")->check(CLI::Range(1, 64));
  app.add_option("--units", settings.units, "units of the model with nothing to compute")
      ->check(CLI::Range(1, 10000));
  app.add_option("--rounds", settings.rounds, "turns of each contender; the median counts")
      ->check(CLI::Range(1, 1000));
  app.add_flag("--every-case", settings.every_case, "more strategies and pools");
  app.add_option("--layers", settings.llama.layers, "blocks of the Llama")
      ->check(CLI::Range(1, 1000));
  CLI11_PARSE(app, argc, argv);
  setenv("FSDP_LOG", "warning", 0);  // the plans of a dozen models say nothing here

  print(settings, measure(settings, part));
  return 0;
}
