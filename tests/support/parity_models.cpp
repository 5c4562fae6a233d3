#include "support/parity_models.h"

#include <ATen/ATen.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>

#include <algorithm>
#include <cmath>
#include <mutex>

#include "fsdp/comm/communicator.h"
#include "fsdp/nn/layers/linear.h"
#include "fsdp/shard/unit.h"

namespace fsdp::testing {

namespace {

using torch::nn::Module;

at::Tensor cross_entropy_sum(const at::Tensor& logits, const at::Tensor& target) {
  return at::cross_entropy_loss(logits.to(at::kFloat).flatten(0, -2), target.flatten(), {},
                                at::Reduction::Sum);
}

// --- kMlp ----------------------------------------------------------------------------------------

struct DirectLayerImpl : Module {
  DirectLayerImpl(int64_t in, int64_t out)
      : linear(register_module("linear", nn::Linear(in, out))),
        gain(register_parameter("gain", at::ones({}))) {}
  at::Tensor forward(const at::Tensor& x) { return at::tanh(linear(x) * gain); }
  nn::Linear linear;
  at::Tensor gain;
};
TORCH_MODULE(DirectLayer);

struct MixedLayerImpl : Module {
  MixedLayerImpl(int64_t in, int64_t out)
      : linear(register_module("linear", torch::nn::Linear(in, out))),
        frozen(register_parameter("frozen", at::linspace(-0.5, 0.5, out), false)),
        empty(register_parameter("empty", at::zeros({0, 3}))) {}
  at::Tensor forward(const at::Tensor& x) { return at::tanh(linear(x) + frozen) + empty.sum(); }
  torch::nn::Linear linear;
  at::Tensor frozen;
  at::Tensor empty;
};
TORCH_MODULE(MixedLayer);

struct MlpImpl : ParityModel {
  MlpImpl()
      : offset(register_parameter("offset", at::full({5}, 0.1))),
        first(register_module("first", Unit<DirectLayer>(5, 17))),
        second(register_module("second", Unit<MixedLayer>(17, 13))),
        third(register_module("third", Unit<torch::nn::Linear>(13, 3))) {}
  at::Tensor summed_loss(const Batch& batch) override {
    const at::Tensor y = third(second(first(batch.input + offset)));
    return (y.to(at::kFloat) - batch.target).square().sum();
  }
  at::Tensor offset;  // outside any unit
  Unit<DirectLayer> first;
  Unit<MixedLayer> second;
  Unit<torch::nn::Linear> third;
};

// --- kLlama --------------------------------------------------------------------------------------

constexpr int64_t kVocab = 19;
constexpr int64_t kHidden = 12;
constexpr int64_t kHeads = 2;
constexpr int64_t kHeadSize = kHidden / kHeads;
constexpr int64_t kFfn = 20;
constexpr int64_t kSequence = 6;

struct RmsNormImpl : Module {
  RmsNormImpl() : weight(register_parameter("weight", at::ones({kHidden}))) {}
  at::Tensor forward(const at::Tensor& x) {
    return x * at::rsqrt(x.square().mean(-1, true) + 1e-5) * weight;
  }
  at::Tensor weight;
};
TORCH_MODULE(RmsNorm);

// Pairs (i, i + half) of a head turn by position * 100^(-i / half).
at::Tensor rotated(const at::Tensor& x) {
  const int64_t half = kHeadSize / 2;
  const at::Tensor angle = at::outer(
      at::arange(x.size(-2), x.options().dtype(at::kFloat)),
      at::pow(100.0, -at::arange(half, x.options().dtype(at::kFloat)) / static_cast<double>(half)));
  const at::Tensor cos = angle.cos().to(x.scalar_type());
  const at::Tensor sin = angle.sin().to(x.scalar_type());
  const at::Tensor a = x.narrow(-1, 0, half);
  const at::Tensor b = x.narrow(-1, half, half);
  return at::cat({a * cos - b * sin, a * sin + b * cos}, -1);
}

struct BlockImpl : Module {
  BlockImpl()
      : attention_norm(register_module("attention_norm", RmsNorm())),
        qkv(register_module("qkv", nn::Linear(no_bias(kHidden, 3 * kHidden)))),
        out(register_module("out", torch::nn::Linear(no_bias(kHidden, kHidden)))),
        ffn_norm(register_module("ffn_norm", RmsNorm())),
        gate(register_module("gate", nn::Linear(no_bias(kHidden, kFfn)))),
        up(register_module("up", nn::Linear(no_bias(kHidden, kFfn)))),
        down(register_module("down", torch::nn::Linear(no_bias(kFfn, kHidden)))) {}

  static torch::nn::LinearOptions no_bias(int64_t in, int64_t out) {
    return torch::nn::LinearOptions(in, out).bias(false);
  }
  at::Tensor attention(const at::Tensor& x) {
    const auto by_head = [&](const at::Tensor& t) {
      return t.unflatten(-1, {kHeads, kHeadSize}).transpose(-2, -3);
    };
    const std::vector<at::Tensor> parts = qkv(x).chunk(3, -1);
    const at::Tensor q = rotated(by_head(parts[0]));
    const at::Tensor k = rotated(by_head(parts[1]));
    const int64_t length = x.size(-2);
    const at::Tensor future =
        at::triu(at::full({length, length}, -1e4, x.options().dtype(at::kFloat)), 1)
            .to(x.scalar_type());
    const at::Tensor score =
        q.matmul(k.transpose(-1, -2)) / std::sqrt(static_cast<double>(kHeadSize)) + future;
    const at::Tensor mixed = score.softmax(-1).matmul(by_head(parts[2]));
    return out(mixed.transpose(-2, -3).flatten(-2));
  }
  at::Tensor forward(const at::Tensor& x) {
    const at::Tensor y = x + attention(attention_norm(x));
    const at::Tensor normed = ffn_norm(y);
    return y + down(at::silu(gate(normed)) * up(normed));
  }
  RmsNorm attention_norm;
  nn::Linear qkv;
  torch::nn::Linear out;
  RmsNorm ffn_norm;
  nn::Linear gate;
  nn::Linear up;
  torch::nn::Linear down;
};
TORCH_MODULE(Block);

struct HeadImpl : Module {
  HeadImpl()
      : norm(register_module("norm", RmsNorm())),
        linear(register_module("linear", nn::Linear(BlockImpl::no_bias(kHidden, kVocab)))) {}
  at::Tensor forward(const at::Tensor& x) { return linear(norm(x)); }
  RmsNorm norm;
  nn::Linear linear;
};
TORCH_MODULE(Head);

struct LlamaImpl : ParityModel {
  LlamaImpl()
      : embedding(register_module("embedding", Unit<torch::nn::Embedding>(kVocab, kHidden))) {
    for (int i = 0; i < 3; ++i)
      blocks.push_back(register_module("blocks" + std::to_string(i), Unit<Block>()));
    head = register_module("head", Unit<Head>());
  }
  at::Tensor summed_loss(const Batch& batch) override {
    at::Tensor x = embedding(batch.input);
    for (Unit<Block>& block : blocks) x = block(x);
    return cross_entropy_sum(head(x), batch.target);
  }
  Unit<torch::nn::Embedding> embedding;
  std::vector<Unit<Block>> blocks;
  Unit<Head> head = nullptr;
};

// --- kHybrid -------------------------------------------------------------------------------------

constexpr int64_t kNarrow = 8;
constexpr int64_t kExperts = 3;

struct WideMlpImpl : Module {
  WideMlpImpl()
      : up(register_module("up", nn::Linear(kNarrow, 43))),
        down(register_module("down", torch::nn::Linear(43, kNarrow))) {}
  at::Tensor forward(const at::Tensor& x) { return x + down(at::gelu(up(x))); }
  nn::Linear up;
  torch::nn::Linear down;
};
TORCH_MODULE(WideMlp);

// One small weight used at every position: its gradient is a sum of many uses. Autograd makes that
// sum before it adds it to those of earlier microbatches; a layer that writes its gradient itself
// adds one use at a time, which rounds differently (linear_test.cpp has that case).
struct RecurrenceImpl : Module {
  RecurrenceImpl()
      : in(register_module("in", torch::nn::Linear(kNarrow, 3))),
        state(register_module("state", torch::nn::Linear(BlockImpl::no_bias(3, 3)))),
        out(register_module("out", nn::Linear(3, kNarrow))) {}
  at::Tensor forward(const at::Tensor& x) {
    const at::Tensor driven = in(x);
    at::Tensor h = at::tanh(driven.select(1, 0));
    std::vector<at::Tensor> states{h};
    for (int64_t t = 1; t < x.size(1); ++t)
      states.push_back(h = at::tanh(driven.select(1, t) + state(h)));
    return x + out(at::stack(states, 1));
  }
  torch::nn::Linear in;
  torch::nn::Linear state;
  nn::Linear out;
};
TORCH_MODULE(Recurrence);

// Each token goes to one expert; an expert without tokens takes no part in the graph.
struct ExpertBankImpl : Module {
  ExpertBankImpl() {
    for (int64_t i = 0; i < kExperts; ++i) {
      const std::string name = "expert" + std::to_string(i);
      if (i == 0)
        direct = register_module(name, nn::Linear(kNarrow, kNarrow));
      else
        experts.push_back(register_module(name, torch::nn::Linear(kNarrow, kNarrow)));
    }
  }
  at::Tensor forward(const at::Tensor& x, const at::Tensor& token) {
    at::Tensor y = x;
    for (int64_t i = 0; i < kExperts; ++i) {
      const at::Tensor chosen = token.remainder(kExperts).eq(i).unsqueeze(-1);
      if (!chosen.any().item<bool>()) continue;
      const at::Tensor rows = chosen.to(x.scalar_type());
      const at::Tensor result =
          i == 0 ? direct(x * rows) : experts[static_cast<size_t>(i - 1)](x * rows);
      y = y + rows * at::tanh(result);
    }
    return y;
  }
  nn::Linear direct = nullptr;
  std::vector<torch::nn::Linear> experts;
};
TORCH_MODULE(ExpertBank);

struct TiedHeadImpl : Module {
  explicit TiedHeadImpl(const at::Tensor& embedding)
      : weight(register_parameter("weight", embedding)),
        bias(register_parameter("bias", at::zeros({kVocab}))) {}
  at::Tensor forward(const at::Tensor& x) { return at::linear(x, weight, bias); }
  at::Tensor weight;
  at::Tensor bias;
};
TORCH_MODULE(TiedHead);

struct HybridImpl : ParityModel {
  HybridImpl()
      : embedding(register_module("embedding", Unit<torch::nn::Embedding>(kVocab, kNarrow))),
        wide(register_module("wide", Unit<WideMlp>())),
        narrow(register_module("narrow", Unit<Recurrence>())),
        bank(register_module("bank", Unit<ExpertBank>())),
        head(register_module("head", Unit<TiedHead>(embedding->weight))) {}
  at::Tensor summed_loss(const Batch& batch) override {
    const at::Tensor x = narrow(wide(embedding(batch.input)));
    return cross_entropy_sum(head(bank(x, batch.input)), batch.target);
  }
  Unit<torch::nn::Embedding> embedding;
  Unit<WideMlp> wide;
  Unit<Recurrence> narrow;
  Unit<ExpertBank> bank;
  Unit<TiedHead> head;
};

std::shared_ptr<ParityModel> construct(ModelKind kind) {
  switch (kind) {
    case ModelKind::kMlp:
      return std::make_shared<MlpImpl>();
    case ModelKind::kLlama:
      return std::make_shared<LlamaImpl>();
    case ModelKind::kHybrid:
      return std::make_shared<HybridImpl>();
  }
  return nullptr;
}

// A fixed sequence of whole numbers in [0, 2^31), different for each seed.
at::Tensor scrambled(int64_t count, int64_t seed) {
  const at::Tensor i = at::arange(count, at::kLong) + 7919 * (seed + 1);
  return (i * 1103515245 + 12345).remainder(int64_t{1} << 31).div(97, "floor");
}

}  // namespace

const char* name_of(ModelKind kind) {
  switch (kind) {
    case ModelKind::kMlp:
      return "mlp";
    case ModelKind::kLlama:
      return "llama";
    case ModelKind::kHybrid:
      return "hybrid";
  }
  return "";
}

std::shared_ptr<ParityModel> make_model(ModelKind kind, at::ScalarType compute) {
  static std::mutex generator_in_use;
  const std::lock_guard lock(generator_in_use);
  at::manual_seed(20240607);
  std::shared_ptr<ParityModel> model = construct(kind);
  model->to(compute);
  model->to(test_device());
  // Otherwise a GPU may add up in the order of its threads, and bits are compared here.
  if (!test_device().is_cpu()) at::globalContext().setDeterministicAlgorithms(true, true);
  return model;
}

Batch make_batch(ModelKind kind, int64_t rank, int64_t step, int64_t microbatch,
                 at::ScalarType compute) {
  const int64_t seed = (step * 16 + rank) * 4 + microbatch;
  const int64_t num_samples = 2 + (rank + microbatch) % 2;
  if (kind == ModelKind::kMlp) {
    const at::Tensor x = scrambled(num_samples * 5, seed).remainder(1000).to(at::kFloat) / 500 - 1;
    const at::Tensor input = x.view({num_samples, 5});
    const at::Tensor target = input.narrow(1, 0, 3).sin() + input.narrow(1, 2, 3);
    return {input.to(test_device(), compute), target.to(test_device()), num_samples};
  }
  at::Tensor token = scrambled(num_samples * (kSequence + 1), seed);
  if (kind == ModelKind::kHybrid) {
    const at::Tensor expert = (token.remainder(2) + seed).remainder(kExperts);
    token = token.div(2, "floor").remainder(kVocab / kExperts) * kExperts + expert;
  } else {
    token = token.remainder(kVocab);
  }
  token = token.view({num_samples, kSequence + 1}).to(test_device());
  return {token.narrow(1, 0, kSequence).contiguous(), token.narrow(1, 1, kSequence).contiguous(),
          num_samples * kSequence};
}

std::vector<std::pair<std::string, at::Tensor>> distinct_parameters(
    const torch::nn::Module& model) {
  std::vector<std::pair<std::string, at::Tensor>> distinct;
  for (const auto& item : model.named_parameters()) {
    const bool is_known = std::any_of(distinct.begin(), distinct.end(), [&](const auto& known) {
      return known.second.is_same(item.value());
    });
    if (!is_known) distinct.emplace_back(item.key(), item.value());
  }
  return distinct;
}

}  // namespace fsdp::testing
