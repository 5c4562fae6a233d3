// Whether a model learns as well with narrow moments, and with a narrow wire: 300 steps of a small
// Llama.
#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/utils.h>

#include <atomic>
#include <mutex>
#include <optional>
#include <string>

#include "fsdp/optim/adamw.h"
#include "fsdp/optim/learning_rate.h"
#include "fsdp/shard/fully_shard.h"
#include "llama.h"
#include "support/run_ranks.h"

namespace fsdp::moment_types_test {
namespace {

constexpr bench::LlamaShape kShape{
    .hidden = 64, .layers = 2, .heads = 2, .ffn = 160, .vocab = 64, .sequence = 16, .batch = 8};
constexpr int kSteps = 300;

// A token follows from the one before it, three times in four: something to learn and something
// that cannot be learned, so that the last loss is not 0.
at::Tensor tokens_of(at::Generator generator) {
  const std::vector<int64_t> shape = {kShape.batch, kShape.sequence + 1};
  const at::Tensor noise = at::randint(kShape.vocab, shape, generator, at::kLong);
  const at::Tensor is_noise = at::rand(shape, generator) < 0.25;
  at::Tensor tokens = noise.clone();
  for (int64_t i = 1; i < shape[1]; ++i) {
    const at::Tensor next = (tokens.select(1, i - 1) * 3 + 1) % kShape.vocab;
    tokens.select(1, i).copy_(at::where(is_noise.select(1, i), noise.select(1, i), next));
  }
  return tokens;
}

// Ranks are threads, which draw from one generator.
bench::Llama make_llama() {
  static std::mutex mutex;
  const std::lock_guard lock(mutex);
  torch::manual_seed(11);
  return bench::Llama(kShape);
}

struct Setup {
  at::ScalarType first = at::kFloat;
  at::ScalarType second = at::kFloat;
  std::optional<at::ScalarType> wire = std::nullopt;
  int outer = 1;
  int inner = 1;
};

// The mean loss of the last 30 steps on all ranks, which share out each batch.
double final_loss(const Setup& setup) {
  std::atomic<double> loss_sum = 0;
  const int ranks = setup.outer * setup.inner;
  testing::run_ranks(ranks, [&](World& world) {
    const Mesh mesh = world.mesh({.outer = setup.outer});
    bench::Llama model = make_llama();
    const Sharded sharded = fully_shard(model, mesh, {.precision = {.grad_comm = setup.wire}});
    AdamW optimizer(sharded, {.weight_decay = 0.1,
                              .first_moment = setup.first,
                              .second_moment = setup.second,
                              .step = {.max_norm = 1.0}});
    const LearningRateOptions schedule{.schedule = RateSchedule::kCosine,
                                       .rate = 3e-3,
                                       .floor = 3e-4,
                                       .warmup_steps = 20,
                                       .total_steps = kSteps};
    at::Generator data = at::detail::createCPUGenerator(5);
    for (int step = 1; step <= kSteps; ++step) {
      const at::Tensor tokens = tokens_of(data).chunk(ranks)[static_cast<size_t>(world.rank())];
      const at::Tensor loss =
          model(tokens.narrow(1, 0, kShape.sequence), tokens.narrow(1, 1, kShape.sequence));
      if (step > kSteps - 30) loss_sum += loss.item<double>() / 30 / ranks;
      loss.backward();
      optimizer.set_learning_rate(learning_rate(schedule, step));
      optimizer.step();
      optimizer.zero_grad();
    }
  });
  return loss_sum;
}

TEST(NarrowMoments, LearnAsFp32OnesDo) {
  const double expected = final_loss({});
  EXPECT_LT(expected, 3.0) << "it learns: guessing costs 4.16";
  struct Case {
    at::ScalarType first, second;
    double tolerance;
  };
  for (const Case& each :
       {Case{at::kBFloat16, at::kBFloat16, 0.01}, Case{at::kHalf, at::kHalf, 0.01},
        Case{at::kFloat8_e4m3fn, at::kFloat8_e4m3fn, 0.02},
        Case{at::kFloat8_e4m3fn, at::kFloat8_e5m2, 0.02},
        Case{at::kFloat, at::kFloat8_e4m3fn, 0.02}}) {
    const double loss = final_loss({each.first, each.second});
    std::printf("moments %s, %s: loss %.4f, %+.2f %% of fp32's %.4f\n", c10::toString(each.first),
                c10::toString(each.second), loss, 100 * (loss / expected - 1), expected);
    EXPECT_NEAR(loss, expected, each.tolerance * expected) << each.first << ", " << each.second;
  }
}

TEST(NarrowWire, LearnsAsAnFp32OneDoes) {
  const double expected = final_loss({.inner = 2});
  EXPECT_LT(expected, 3.0) << "it learns: guessing costs 4.16";
  for (const int outer : {1, 2}) {
    const double loss = final_loss({.wire = at::kBFloat16, .outer = outer, .inner = 2});
    std::printf("bf16 wire, outer %d: loss %.4f, %+.2f %% of fp32's %.4f\n", outer, loss,
                100 * (loss / expected - 1), expected);
    EXPECT_NEAR(loss, expected, 0.01 * expected) << "outer " << outer;
    EXPECT_NE(loss, expected) << "the wire was not narrow";
  }
}

}  // namespace
}  // namespace fsdp::moment_types_test
