// The cost of an optimizer's step in a training step: hidden, blocking and offloaded side by side,
// with a picture of what runs when; what the gradient norm costs where it comes out of the
// reduction; and on a GPU, what its kernels make of its memory bandwidth.
#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <CLI/CLI.hpp>
#include <cstdio>
#include <memory>
#include <string>
#include <vector>

#include "fsdp/comm/reduce/reduce_ranks.h"
#include "fsdp/fsdp.h"
#include "llama.h"
#include "timeline.h"
#include "turns.h"
#include "update_kernels.h"

namespace {

struct Settings {
  int rounds = 7;
  c10::Device device = c10::kCPU;
  // Little data, so that updates take a part of a step that can be seen.
  bench::LlamaShape llama{.hidden = 512, .ffn = 1536, .sequence = 32, .batch = 1};
};

// Until the device has done what it was asked for.
void synchronize(c10::Device device) {
  if (!device.is_cpu())
    c10::impl::VirtualGuardImpl(device.type()).synchronizeDevice(device.index());
}

// A model on one rank, and its optimizer.
class Trainee {
 public:
  Trainee(const Settings& settings, const fsdp::Mesh& mesh, const fsdp::ShardOptions& shard,
          const fsdp::StepOptions& step) {
    at::manual_seed(7);
    model_ = bench::Llama(settings.llama);
    const bench::LlamaShape& shape = settings.llama;
    model_->to(settings.device);
    tokens_ = at::randint(shape.vocab, {shape.batch, shape.sequence},
                          at::device(settings.device).dtype(at::kLong));
    sharded_ = std::make_unique<fsdp::Sharded>(fsdp::fully_shard(model_, mesh, shard));
    optimizer_ =
        std::make_unique<fsdp::AdamW>(*sharded_, fsdp::AdamWOptions{.lr = 1e-4, .step = step});
  }

  void backward() { forward().backward(); }
  void update() {
    optimizer_->step();
    optimizer_->zero_grad();
  }
  at::Tensor forward() { return model_->forward(tokens_, tokens_); }
  // From backward to backward, so that a hidden update has a forward to hide under.
  void step() {
    update();
    backward();
  }

 private:
  bench::Llama model_{nullptr};
  at::Tensor tokens_;
  std::unique_ptr<fsdp::Sharded> sharded_;
  std::unique_ptr<fsdp::AdamW> optimizer_;
};

struct Case {
  const char* name;
  fsdp::Updates updates;
  fsdp::Offload offload;
};

const std::vector<bench::TimelineRow> kRows = {
    {"step()", "fsdp::step", true},
    {"computing", "aten::", true},
    {"updates", "fsdp::update_unit", false},
    {"gradients down", "fsdp::gradients_to_host", false},
    {"host updates", "fsdp::update_on_host", false},
    {"weights up", "fsdp::weights_to_device", false},
};

void compare_steps(const Settings& settings) {
  const std::vector<Case> cases = {
      {"blocking", fsdp::Updates::kBlocking, {}},
      {"hidden", fsdp::Updates::kHidden, {}},
      {"all on the host, blocking", fsdp::Updates::kBlocking, {.fraction = 1.0, .overlap = false}},
      {"all on the host, hidden", fsdp::Updates::kHidden, {.fraction = 1.0}},
  };
  fsdp::run_threads(1, {}, [&](fsdp::World& world) {
    // Computing takes one core, updates another; beside a device the host has nothing else to do.
    if (settings.device.is_cpu()) at::set_num_threads(1);
    const fsdp::Mesh mesh = world.mesh();
    std::vector<std::unique_ptr<Trainee>> trainees;
    std::vector<bench::Contender> contenders;
    for (const Case& each : cases) {
      fsdp::ShardOptions shard;
      shard.offload = each.offload;
      shard.offload.chunk_numel = 1 << 18;
      trainees.push_back(std::make_unique<Trainee>(settings, mesh, shard,
                                                   fsdp::StepOptions{.updates = each.updates}));
      trainees.back()->backward();
      contenders.push_back({each.name, [trainee = trainees.back().get()] { trainee->step(); }});
    }
    const auto meet = [&] { synchronize(settings.device); };
    bench::take_turns(contenders, {.rounds = 1, .steps = 2}, meet);
    const bench::Timings times =
        bench::take_turns(contenders, {.rounds = settings.rounds, .steps = 3}, meet);
    std::printf(
        "# a training step of a %lld-layer fp32 Llama, hidden %lld, one rank on %s, %d threads\n",
        static_cast<long long>(settings.llama.layers),
        static_cast<long long>(settings.llama.hidden), settings.device.str().c_str(),
        at::get_num_threads());
    std::printf("# %-28s %10s %14s\n", "updates", "ms", "of blocking");
    for (size_t i = 0; i < cases.size(); ++i)
      std::printf("%-30s %10.2f %14.3f\n", cases[i].name, times.best_us(i) / 1e3,
                  times.best_us(i) / times.best_us(0));
    // The host's hooks do not see what runs on a device.
    for (size_t i = 0; settings.device.is_cpu() && i < cases.size(); ++i) {
      std::printf("# %s: step() and the forward after it\n", cases[i].name);
      bench::Timeline timeline(kRows);
      trainees[i]->update();
      const at::Tensor loss = trainees[i]->forward();
      timeline.stop();
      timeline.print(90);
      loss.backward();
    }
  });
}

// A reduction of two ranks' gradients, as the threads backend runs it on each rank.
void price_of_the_norm(const Settings& settings) {
  constexpr int64_t kNumel = 1 << 22;
  std::printf("# reducing 2 ranks' gradients of %lld elements, one thread\n",
              static_cast<long long>(kNumel));
  std::printf("# %-10s %-12s %14s %14s %14s\n", "wire", "into", "us", "with flag", "with squares");
  const std::vector<fsdp::ReduceTypes> cases = {
      {at::kFloat, at::kFloat}, {at::kBFloat16, at::kFloat}, {at::kBFloat16, at::kBFloat16}};
  for (const fsdp::ReduceTypes& types : cases) {
    const at::Tensor a = at::randn({kNumel}).to(types.wire);
    const at::Tensor b = at::randn({kNumel}).to(types.wire);
    const at::Tensor out = at::empty({kNumel}, types.result);
    const at::Tensor flag = at::zeros({1});
    const at::Tensor squares = at::zeros({1}, at::kDouble);
    const std::vector<const void*> inputs = {a.const_data_ptr(), b.const_data_ptr()};
    const auto reduce = [&](const fsdp::Reduction& reduction) {
      fsdp::reduce_ranks({inputs, out.mutable_data_ptr(), kNumel, types},
                         fsdp::checked_reduction(reduction, types, "bench"));
    };
    const bench::Timings times =
        bench::take_turns({{"plain", [&] { reduce({}); }},
                           {"flag", [&] { reduce({.nonfinite = flag}); }},
                           {"squares", [&] { reduce({.nonfinite = flag, .squares = squares}); }}},
                          {.rounds = 4 * settings.rounds, .steps = 2}, [] {});
    std::printf("%-12s %-12s %14.1f %14.3f %14.3f\n", c10::toString(types.wire),
                c10::toString(types.result), times.best_us(0), times.best_us(1) / times.best_us(0),
                times.best_us(2) / times.best_us(0));
  }
}

}  // namespace

int main(int argc, char** argv) {
  Settings settings;
  CLI::App app{"What an optimizer's step costs a training step"};
  app.add_option("--rounds", settings.rounds, "Turns of every contender")->capture_default_str();
  app.add_option("--hidden", settings.llama.hidden, "Width of the model")->capture_default_str();
  app.add_option("--layers", settings.llama.layers, "Blocks of the model")->capture_default_str();
  app.add_option("--ffn", settings.llama.ffn, "Width of its feed-forward part");
  app.add_option("--batch", settings.llama.batch, "Sequences per step")->capture_default_str();
  app.add_option("--sequence", settings.llama.sequence, "Tokens of each")->capture_default_str();
  std::string device = "cpu";
  app.add_option("--device", device, "Where the model is, such as cuda:0")->capture_default_str();
  bool kernels_only = false;
  app.add_flag("--kernels", kernels_only, "The kernels of a GPU alone, without training steps");
  CLI11_PARSE(app, argc, argv);
  settings.device = c10::Device(device);
  if (!kernels_only) compare_steps(settings);
  if (settings.device.is_cpu()) {
    price_of_the_norm(settings);
  } else {
    bench::compare_kernels(settings.device, settings.rounds);
  }
  std::printf("# result: OK\n");
}
