// Whether a model learns as well with narrow moments: 300 steps of a small Llama.
#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/utils.h>

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

double final_loss(at::ScalarType first, at::ScalarType second) {
  double loss_sum = 0;
  testing::run_ranks(1, [&](World& world) {
    const Mesh mesh = world.mesh();
    torch::manual_seed(11);
    bench::Llama model(kShape);
    const Sharded sharded = fully_shard(model, mesh);
    AdamW optimizer(sharded, {.weight_decay = 0.1,
                              .first_moment = first,
                              .second_moment = second,
                              .step = {.max_norm = 1.0}});
    const LearningRateOptions schedule{.schedule = RateSchedule::kCosine,
                                       .rate = 3e-3,
                                       .floor = 3e-4,
                                       .warmup_steps = 20,
                                       .total_steps = kSteps};
    at::Generator data = at::detail::createCPUGenerator(5);
    for (int step = 1; step <= kSteps; ++step) {
      const at::Tensor tokens = tokens_of(data);
      const at::Tensor loss =
          model(tokens.narrow(1, 0, kShape.sequence), tokens.narrow(1, 1, kShape.sequence));
      if (step > kSteps - 30) loss_sum += loss.item<double>() / 30;
      loss.backward();
      optimizer.set_learning_rate(learning_rate(schedule, step));
      optimizer.step();
      optimizer.zero_grad();
    }
  });
  return loss_sum;
}

TEST(NarrowMoments, LearnAsFp32OnesDo) {
  const double expected = final_loss(at::kFloat, at::kFloat);
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
    const double loss = final_loss(each.first, each.second);
    std::printf("moments %s, %s: loss %.4f, %+.2f %% of fp32's %.4f\n", c10::toString(each.first),
                c10::toString(each.second), loss, 100 * (loss / expected - 1), expected);
    EXPECT_NEAR(loss, expected, each.tolerance * expected) << each.first << ", " << each.second;
  }
}

}  // namespace
}  // namespace fsdp::moment_types_test
