// What an optimizer's step costs a training step: hidden, blocking and offloaded side by side, with
// a picture of what runs when; and what the gradient norm costs where it comes out of the
// reduction.
#include <ATen/ATen.h>

#include <CLI/CLI.hpp>
#include <cstdio>
#include <memory>
#include <string>
#include <vector>

#include "fsdp/comm/reduce_ranks.h"
#include "fsdp/fsdp.h"
#include "llama.h"
#include "timeline.h"
#include "turns.h"

namespace {

struct Settings {
  int rounds = 7;
  // Little data, so that updates take a part of a step that can be seen.
  bench::LlamaShape llama{.hidden = 512, .ffn = 1536, .sequence = 32, .batch = 1};
};

// A model on one rank, and its optimizer.
class Trainee {
 public:
  Trainee(const Settings& settings, const fsdp::Mesh& mesh, const fsdp::ShardOptions& shard,
          const fsdp::StepOptions& step) {
    at::manual_seed(7);
    model_ = bench::Llama(settings.llama);
    const bench::LlamaShape& shape = settings.llama;
    tokens_ = at::randint(shape.vocab, {shape.batch, shape.sequence}, at::kLong);
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
    at::set_num_threads(1);  // computing takes one core, updates another
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
    bench::take_turns(world, contenders, {.rounds = 1, .steps = 2});
    const bench::Timings times =
        bench::take_turns(world, contenders, {.rounds = settings.rounds, .steps = 1});
    std::printf(
        "# a training step of a %lld-layer fp32 Llama, hidden %lld, one rank, one thread each\n",
        static_cast<long long>(settings.llama.layers),
        static_cast<long long>(settings.llama.hidden));
    std::printf("# %-28s %10s %14s\n", "updates", "ms", "of blocking");
    for (size_t i = 0; i < cases.size(); ++i)
      std::printf("%-30s %10.2f %14.3f\n", cases[i].name, times.best_us(i) / 1e3,
                  times.best_us(i) / times.best_us(0));
    for (size_t i = 0; i < cases.size(); ++i) {
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

// A reduction of two ranks' gradients into fp32, as the threads backend runs it on each rank.
void price_of_the_norm(const Settings& settings) {
  constexpr int64_t kNumel = 1 << 22;
  std::printf("# reducing 2 ranks' gradients of %lld elements into fp32, one thread\n",
              static_cast<long long>(kNumel));
  std::printf("# %-10s %14s %14s %14s\n", "wire", "us", "with flag", "with squares");
  for (const at::ScalarType wire : {at::kFloat, at::kBFloat16}) {
    const at::Tensor a = at::randn({kNumel}).to(wire);
    const at::Tensor b = at::randn({kNumel}).to(wire);
    const at::Tensor out = at::empty({kNumel});
    const at::Tensor flag = at::zeros({1});
    const at::Tensor squares = at::zeros({1}, at::kDouble);
    const std::vector<const void*> inputs = {a.const_data_ptr(), b.const_data_ptr()};
    const fsdp::ReduceTypes types{wire, at::kFloat};
    const auto reduce = [&](const fsdp::Reduction& reduction) {
      fsdp::reduce_ranks({inputs, out.mutable_data_ptr(), kNumel, types},
                         fsdp::checked_reduction(reduction, types, "bench"));
    };
    const bench::Timings times =
        bench::take_turns({{"plain", [&] { reduce({}); }},
                           {"flag", [&] { reduce({.nonfinite = flag}); }},
                           {"squares", [&] { reduce({.nonfinite = flag, .squares = squares}); }}},
                          {.rounds = 4 * settings.rounds, .steps = 2}, [] {});
    std::printf("%-12s %14.1f %14.3f %14.3f\n", c10::toString(wire), times.best_us(0),
                times.best_us(1) / times.best_us(0), times.best_us(2) / times.best_us(0));
  }
}

}  // namespace

int main(int argc, char** argv) {
  Settings settings;
  CLI::App app{"What an optimizer's step costs a training step"};
  app.add_option("--rounds", settings.rounds, "Turns of every contender")->capture_default_str();
  app.add_option("--hidden", settings.llama.hidden, "Width of the model")->capture_default_str();
  app.add_option("--layers", settings.llama.layers, "Blocks of the model")->capture_default_str();
  CLI11_PARSE(app, argc, argv);
  compare_steps(settings);
  price_of_the_norm(settings);
  std::printf("# result: OK\n");
}
