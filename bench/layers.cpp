// bench_layers: what the element-wise parts of a Llama's layers cost, and its loss, ours beside the
// same written with ATen's operations, forward and backward.
//
//   bench_layers                                     small, fp32 on one CPU thread
//   bench_layers --device cuda                       llama-1b's shapes with 4 x 2048 tokens, bf16
//
// On a device calls are recorded, so that the host's part does not count.
#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <c10/core/StreamGuard.h>
#include <torch/csrc/autograd/autograd.h>

#include <CLI/CLI.hpp>
#include <cstdio>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "device_meter.h"
#include "fsdp/graph/device_graph.h"
#include "fsdp/nn/layers/feed_forward.h"
#include "fsdp/nn/layers/head_loss.h"
#include "fsdp/nn/layers/quantized_rows.h"
#include "fsdp/nn/layers/rms_norm.h"
#include "fsdp/nn/layers/rotary.h"
#include "timings.h"

namespace {

using Tensors = std::vector<at::Tensor>;
using Function = std::function<Tensors(const Tensors&)>;
namespace nn = fsdp::nn;

struct Settings {
  c10::Device device = c10::kCPU;
  at::ScalarType dtype = at::kFloat;
  int64_t batch = 4;
  int64_t sequence = 0;
  int64_t hidden = 0;
  int64_t intermediate = 0;
  int64_t heads = 0;
  int64_t kv_heads = 0;
  int64_t vocabulary = 0;
  int rounds = 5;
};

struct Layer {
  std::string name;
  std::vector<std::vector<int64_t>> inputs;
  double forward_passes = 0.0;   // over the first input's memory, at the least
  double backward_passes = 0.0;  // 0: it has no gradient
  Function ours;
  Function aten;
  // The backward with its forward: for a layer whose forward computes gradients.
  bool is_one = false;
};

// Tensors in turn, so that what a call reads has left the caches.
constexpr int kCopies = 3;
constexpr int kCallsPerTurn = 12;

// Calls on their way to the device: recorded there, and called as they are on a CPU.
class Repeated {
 public:
  Repeated(c10::Device device, const c10::Stream& stream, const std::function<void(int)>& call)
      : stream_(stream) {
    const auto all = [call] {
      for (int i = 0; i < kCallsPerTurn; ++i) call(i % kCopies);
    };
    if (device.is_cpu()) {
      run_ = all;
      return;
    }
    const c10::StreamGuard on_stream(stream_);
    for (int i = 0; i < kCopies; ++i) call(i);
    bench::synchronize(device);
    graph_ = fsdp::make_device_graph(device);
    graph_->begin({});
    all();
    graph_->end();
    run_ = [this] {
      const c10::StreamGuard here(stream_);
      graph_->replay();
    };
  }
  void operator()() const { run_(); }

 private:
  const c10::Stream stream_;
  std::shared_ptr<fsdp::DeviceGraph> graph_;
  std::function<void()> run_;
};

class Bench {
 public:
  explicit Bench(const Settings& settings)
      : settings_(settings), stream_(other_stream(settings.device)) {}

  void copy() {
    const c10::StreamGuard on_stream(stream_);
    Tensors from, to;
    for (int i = 0; i < kCopies; ++i) {
      from.push_back(numbers({settings_.batch * settings_.sequence, settings_.intermediate}));
      to.push_back(at::empty_like(from.back()));
    }
    const double us =
        time({[&](int i) { to[static_cast<size_t>(i)].copy_(from[static_cast<size_t>(i)]); }})[0];
    copy_rate_ = 2.0 * static_cast<double>(from[0].nbytes()) / us / 1e3;
    std::printf("%-24s %-9s %10.1f %10s %10.0f %8.0f %%\n", "copy", "", us, "", copy_rate_, 100.0);
  }

  void measure(const Layer& layer) {
    const c10::StreamGuard on_stream(stream_);
    std::vector<Tensors> inputs;
    for (int i = 0; i < kCopies; ++i) {
      inputs.emplace_back();
      for (const auto& shape : layer.inputs)
        inputs.back().push_back(numbers(shape).set_requires_grad(true));
    }
    const auto bytes = static_cast<double>(inputs[0][0].nbytes());
    const auto forward = [&](const Function& function) {
      return [&inputs, function](int i) {
        const at::NoGradGuard no_grad;
        function(inputs[static_cast<size_t>(i)]);
      };
    };
    report(layer.name, "forward", layer.forward_passes * bytes,
           time({forward(layer.ours), forward(layer.aten)}));
    if (layer.backward_passes == 0.0) return;
    const auto back = layer.is_one ? forward_and_backward : backward;
    report(layer.name, layer.is_one ? "both" : "backward", layer.backward_passes * bytes,
           time({back(layer.ours, inputs), back(layer.aten, inputs)}));
  }

 private:
  static c10::Stream other_stream(c10::Device device) {
    const c10::impl::VirtualGuardImpl guard(device.type());
    return device.is_cpu() ? guard.getStream(device) : guard.getStreamFromGlobalPool(device);
  }

  at::Tensor numbers(const std::vector<int64_t>& shape) const {
    return at::randn(shape, at::device(settings_.device).dtype(at::kFloat)).to(settings_.dtype);
  }

  static std::function<void(int)> backward(const Function& function,
                                           const std::vector<Tensors>& inputs) {
    std::vector<Tensors> outputs, gradients;
    for (const Tensors& each : inputs) {
      outputs.push_back(function(each));
      gradients.emplace_back();
      for (const at::Tensor& output : outputs.back())
        gradients.back().push_back(at::ones_like(output));
    }
    return [inputs, outputs, gradients](int i) {
      const auto which = static_cast<size_t>(i);
      torch::autograd::grad(outputs[which], inputs[which], gradients[which],
                            /*retain_graph=*/true);
    };
  }

  static std::function<void(int)> forward_and_backward(const Function& function,
                                                       const std::vector<Tensors>& inputs) {
    return [function, inputs](int i) {
      const auto which = static_cast<size_t>(i);
      torch::autograd::grad(function(inputs[which]), inputs[which]);
    };
  }

  // Microseconds of a call.
  std::vector<double> time(const std::vector<std::function<void(int)>>& calls) const {
    std::vector<std::unique_ptr<Repeated>> repeated;
    std::vector<bench::Contender> contenders;
    for (const auto& call : calls) {
      repeated.push_back(std::make_unique<Repeated>(settings_.device, stream_, call));
      contenders.push_back({"", [&run = *repeated.back()] { run(); }});
    }
    const bench::Timings timings =
        bench::take_turns(contenders, {.rounds = settings_.rounds, .steps = 1},
                          [&] { bench::synchronize(settings_.device); });
    std::vector<double> us;
    for (size_t i = 0; i < calls.size(); ++i) us.push_back(timings.best_us(i) / kCallsPerTurn);
    return us;
  }

  void report(const std::string& name, const char* direction, double bytes,
              const std::vector<double>& us) const {
    const double rate = bytes / us[0] / 1e3;
    std::printf("%-24s %-9s %10.1f %10.1f %10.0f %8.0f %%\n", name.c_str(), direction, us[0], us[1],
                rate, 100.0 * rate / copy_rate_);
    std::fflush(stdout);
  }

  const Settings settings_;
  const c10::Stream stream_;
  double copy_rate_ = 1.0;
};

// --- the layers ----------------------------------------------------------------------------------

at::Tensor rotated_by_aten(const at::Tensor& x, const nn::RotaryTables& tables) {
  const auto half = x.to(at::kFloat).chunk(2, -1);
  const at::Tensor c = tables.cosine.unsqueeze(1);
  const at::Tensor s = tables.sine.unsqueeze(1);
  return at::cat({half[0] * c - half[1] * s, half[1] * c + half[0] * s}, -1).to(x.scalar_type());
}

Layer rotary(const Settings& n) {
  const int64_t dim = n.hidden / n.heads;
  const auto angles = std::make_shared<nn::Rotary>(
      fsdp::LlamaConfig{.hidden_size = n.hidden, .num_attention_heads = n.heads, .head_dim = dim});
  const nn::RotaryTables tables = angles->tables(0, n.sequence, n.device);
  const double passes = 2.0 + 2.0 * static_cast<double>(n.kv_heads) / static_cast<double>(n.heads);
  return {.name = "rotary positions",
          .inputs = {{n.batch, n.sequence, n.heads, dim}, {n.batch, n.sequence, n.kv_heads, dim}},
          .forward_passes = passes,
          .backward_passes = passes,
          .ours =
              [tables](const Tensors& in) {
                const nn::QueryAndKey result = nn::rotate({in[0], in[1]}, tables);
                return Tensors{result.query, result.key};
              },
          .aten =
              [tables](const Tensors& in) {
                return Tensors{rotated_by_aten(in[0], tables), rotated_by_aten(in[1], tables)};
              }};
}

Layer gated_mlp(const Settings& n) {
  const std::vector<int64_t> shape = {n.batch * n.sequence, n.intermediate};
  return {.name = "silu(gate) * up",
          .inputs = {shape, shape},
          .forward_passes = 3,
          .backward_passes = 5,
          .ours = [](const Tensors& in) { return Tensors{nn::gated_silu(in[0], in[1])}; },
          .aten = [](const Tensors& in) { return Tensors{at::silu(in[0]) * in[1]}; }};
}

// Products of matrices, not memory, take the time of it. The forward is one without gradients.
Layer head_loss(const Settings& n) {
  const at::Tensor targets =
      at::randint(n.vocabulary, {n.batch * n.sequence}, at::device(n.device).dtype(at::kLong));
  return {.name = "head, cross entropy",
          .inputs = {{n.batch * n.sequence, n.hidden}, {n.vocabulary, n.hidden}},
          .ours = [targets](
                      const Tensors& in) { return Tensors{nn::head_loss(in[0], in[1], targets)}; },
          .aten =
              [targets](const Tensors& in) {
                return Tensors{
                    at::cross_entropy_loss(at::linear(in[0], in[1]).to(at::kFloat), targets)};
              },
          .is_one = true};
}

Layer norm(const Settings& n) {
  const std::vector<int64_t> shape = {n.batch * n.sequence, n.hidden};
  return {.name = "RMS norm",
          .inputs = {shape, {n.hidden}},
          .forward_passes = 2,
          .backward_passes = 3,
          .ours = [](const Tensors& in) { return Tensors{nn::rms_norm(in[0], in[1], 1e-5)}; },
          .aten =
              [](const Tensors& in) {
                return Tensors{at::rms_norm(in[0], in[1].sizes(), in[1], 1e-5)};
              }};
}

Layer residual_norm(const Settings& n) {
  const std::vector<int64_t> shape = {n.batch * n.sequence, n.hidden};
  return {.name = "sum, RMS norm",
          .inputs = {shape, shape, {n.hidden}},
          .forward_passes = 4,
          .backward_passes = 4,
          .ours =
              [](const Tensors& in) {
                nn::RmsNorm norm(in[2].size(0), 1e-5);
                norm->weight = in[2];
                const nn::NormedBranch branch = norm->branch(in[0], in[1]);
                return Tensors{branch.around, branch.normed};
              },
          .aten =
              [](const Tensors& in) {
                const at::Tensor sum = in[0] + in[1];
                return Tensors{sum, at::rms_norm(sum, in[2].sizes(), in[2], 1e-5)};
              }};
}

// --- codes ---------------------------------------------------------------------------------------

at::Tensor row_codes_by_aten(const at::Tensor& x) {
  const at::Tensor wide = x.to(at::kFloat);
  return (wide * (448.0 / wide.abs().amax(1, true))).to(at::kFloat8_e4m3fn);
}

Layer row_codes(const Settings& n) {
  return {.name = "codes of rows",
          .inputs = {{n.batch * n.sequence, n.intermediate}},
          .forward_passes = 1.0 + 1.0 / static_cast<double>(c10::elementSize(n.dtype)),
          .ours =
              [](const Tensors& in) {
                return Tensors{nn::quantize_rows(in[0], nn::ScaleBlock::kRow).codes};
              },
          .aten = [](const Tensors& in) { return Tensors{row_codes_by_aten(in[0])}; }};
}

// Scales of rows and columns are known after a pass over everything; those of pieces are not.
Layer two_codes(const Settings& n, const char* name, nn::ScaleBlock block, double reads) {
  return {
      .name = name,
      .inputs = {{n.batch * n.sequence, n.intermediate}},
      .forward_passes = reads + 2.0 / static_cast<double>(c10::elementSize(n.dtype)),
      .ours =
          [block](const Tensors& in) {
            return Tensors{nn::quantize_two_forms({{in[0], {}}}, block).by_columns.front().codes};
          },
      .aten =
          [](const Tensors& in) {
            return Tensors{row_codes_by_aten(in[0]), row_codes_by_aten(in[0].t().contiguous())};
          }};
}

Layer turned_codes(const Settings& n) {
  const auto bytes = [](const Tensors& in) { return in[0].view(at::kByte); };
  return {.name = "codes transposed",
          .inputs = {{n.batch * n.sequence, n.intermediate}},
          .forward_passes = 2,
          .ours =
              [bytes](const Tensors& in) {
                return Tensors{nn::transposed_codes(bytes(in).view(at::kFloat8_e4m3fn))};
              },
          .aten = [bytes](const Tensors& in) { return Tensors{bytes(in).t().contiguous()}; }};
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app("What the element-wise parts of a Llama's layers cost.");
  Settings settings;
  std::string device = "cpu";
  app.add_option("--device", device, "cpu or cuda")->check(CLI::IsMember({"cpu", "cuda"}));
  app.add_option("--rounds", settings.rounds, "Turns of every contender");
  CLI11_PARSE(app, argc, argv);
  const bool on_cpu = device == "cpu";
  settings.device = on_cpu ? c10::Device("cpu") : c10::Device("cuda:0");
  settings.dtype = on_cpu ? at::kFloat : at::kBFloat16;
  settings.sequence = on_cpu ? 64 : 2048;
  settings.hidden = on_cpu ? 192 : 2048;
  settings.intermediate = on_cpu ? 512 : 5632;
  settings.heads = on_cpu ? 6 : 32;
  settings.kv_heads = on_cpu ? 2 : 4;
  settings.vocabulary = on_cpu ? 257 : 32000;
  at::set_num_threads(1);

  std::printf("# %s, %s, %ld x %ld tokens, %ld wide\n", device.c_str(),
              c10::toString(settings.dtype), settings.batch, settings.sequence, settings.hidden);
  std::printf("%-24s %-9s %10s %10s %10s %10s\n", "# layer", "", "us", "ATen us", "GB/s",
              "of copy");
  Bench bench(settings);
  bench.copy();
  for (const Layer& layer : {rotary(settings), gated_mlp(settings), head_loss(settings),
                             norm(settings), residual_norm(settings)})
    bench.measure(layer);
  bench.measure(row_codes(settings));
  bench.measure(two_codes(settings, "both codes, of rows", nn::ScaleBlock::kRow, 2.0));
  bench.measure(two_codes(settings, "both codes, of pieces", nn::ScaleBlock::kPiece, 1.0));
  bench.measure(turned_codes(settings));
  return 0;
}
