// What an optimizer's step costs a training step: hidden, blocking and offloaded side by side, with
// a picture of what runs when; and what the gradient norm costs where it comes out of the
// reduction.
#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <CLI/CLI.hpp>
#include <cstdio>
#include <memory>
#include <string>
#include <vector>

#include "fsdp/comm/reduce_on_device.h"
#include "fsdp/comm/reduce_ranks.h"
#include "fsdp/fsdp.h"
#include "fsdp/optim/span_update.h"
#include "fsdp/optim/update_on_device.h"
#include "llama.h"
#include "timeline.h"
#include "turns.h"

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
    // What runs on a device is not seen by the host's hooks.
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

// One flat shard on a device: fp32 gradients and moments, bf16 weights with a remainder, beside a
// copy and libtorch's fused AdamW with the cast it needs.
void compare_kernels(const Settings& settings) {
  constexpr int64_t kNumel = int64_t{1} << 28;
  const auto on = at::device(settings.device);
  const auto zeros = [&](at::ScalarType type) { return at::zeros({kNumel}, on.dtype(type)); };
  const at::Tensor gradient = at::randn({kNumel}, on);
  const at::Tensor weight = zeros(at::kBFloat16);
  const at::Tensor remainder = zeros(at::kShort);
  const at::Tensor first = zeros(at::kFloat);
  const at::Tensor second = zeros(at::kFloat);
  at::Tensor state = at::zeros({static_cast<int64_t>(sizeof(fsdp::StepState))}, at::kByte);
  *static_cast<fsdp::StepState*>(state.mutable_data_ptr()) = {
      .learning_rate = 1e-3, .step = 1, .beta1_power = 0.9, .beta2_power = 0.999};
  state = state.to(settings.device);
  const fsdp::UpdateSpan span{.gradient = gradient.const_data_ptr(),
                              .weight = weight.mutable_data_ptr(),
                              .weight_dtype = fsdp::DType::kBFloat16,
                              .main = fsdp::MainWeight::kSplit,
                              .main_weight = remainder.mutable_data_ptr(),
                              .first = {.values = first.mutable_data_ptr()},
                              .second = {.values = second.mutable_data_ptr()},
                              .numel = kNumel};
  // Gradients of two ranks that arrive in bf16 and are added to fp32 main gradients, with the sum
  // of squares; and the norm of gradients that no reduction has looked at.
  const at::Tensor arrived = at::randn({2, kNumel}, on.dtype(at::kBFloat16));
  const at::Tensor narrow = arrived[0];
  const at::Tensor squares = at::zeros({1}, on.dtype(at::kDouble));
  at::Tensor sum_workspace;
  const at::Tensor norm_workspace =
      at::empty({fsdp::squared_sum_workspace_numel()}, on.dtype(at::kDouble));
  const std::vector<at::Tensor> contributions = {arrived[0], arrived[1]};
  fsdp::Reduction reduction{
      .accumulate = at::kFloat, .store = fsdp::Store::kAdd, .squares = squares};
  const auto add_squares = [&](const at::Tensor& values, fsdp::DType dtype) {
    fsdp::squared_sum_on_device(
        values.const_data_ptr(), dtype, kNumel, squares.mutable_data_ptr<double>(),
        norm_workspace.mutable_data_ptr<double>(), fsdp::current_stream(settings.device));
  };
  std::vector<at::Tensor> theirs = {zeros(at::kFloat)}, grads = {gradient},
                          firsts = {zeros(at::kFloat)}, seconds = {zeros(at::kFloat)},
                          steps = {at::ones({}, on.dtype(at::kFloat))};
  const bench::Timings times = bench::take_turns(
      {{"copy", [&] { firsts[0].copy_(gradient); }},
       {"ours",
        [&] {
          fsdp::update_on_device(span, fsdp::AdamWRule{},
                                 static_cast<const fsdp::StepState*>(state.const_data_ptr()),
                                 settings.device);
        }},
       {"libtorch",
        [&] {
          at::_fused_adamw_(theirs, grads, firsts, seconds, {}, steps, 1e-3, 0.9, 0.999, 0.01, 1e-8,
                            false, false);
        }},
       {"cast", [&] { weight.copy_(theirs[0]); }},
       {"sum", [&] { fsdp::reduce_on_device(contributions, reduction, firsts[0], sum_workspace); }},
       {"norm of fp32", [&] { add_squares(gradient, fsdp::DType::kFloat32); }},
       {"norm of bf16", [&] { add_squares(narrow, fsdp::DType::kBFloat16); }}},
      {.rounds = settings.rounds, .steps = 4}, [&] { synchronize(settings.device); });
  const auto row = [&](const char* name, double us, int bytes) {
    const double rate = static_cast<double>(kNumel) * bytes / us / 1e3;
    std::printf("%-44s %10.1f %10.0f %8.0f %%\n", name, us, rate,
                100 * rate / (static_cast<double>(kNumel) * 8 / times.best_us(0) / 1e3));
  };
  std::printf("# AdamW on %lld elements on %s\n", static_cast<long long>(kNumel),
              settings.device.str().c_str());
  std::printf("# %-42s %10s %10s %10s\n", "what", "us", "GB/s", "of copy");
  row("copy", times.best_us(0), 8);
  row("ours: fp32 gradient, bf16 + remainder", times.best_us(1), 28);
  row("libtorch's fused AdamW, fp32", times.best_us(2), 28);
  row("libtorch's copy_ to bf16", times.best_us(3), 6);
  row("sum of two ranks' bf16, added to fp32", times.best_us(4), 12);
  row("squared sum of fp32", times.best_us(5), 4);
  row("squared sum of bf16", times.best_us(6), 2);
  std::printf("# libtorch's fused AdamW and copy_ / ours %.2f\n",
              (times.best_us(2) + times.best_us(3)) / times.best_us(1));
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
  CLI11_PARSE(app, argc, argv);
  settings.device = c10::Device(device);
  compare_steps(settings);
  if (settings.device.is_cpu()) {
    price_of_the_norm(settings);
  } else {
    compare_kernels(settings);
  }
  std::printf("# result: OK\n");
}
