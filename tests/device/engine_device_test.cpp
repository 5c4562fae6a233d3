// The engine on a CUDA device: streams, events and slabs, with ranks that are threads on one GPU.
#include <ATen/ATen.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/linear.h>

#include <mutex>
#include <string>
#include <tuple>
#include <vector>

#include "fsdp/base/text.h"
#include "fsdp/nn/layers/linear.h"
#include "fsdp/shard/fully_shard.h"
#include "fsdp/shard/recompute.h"
#include "fsdp/shard/unit.h"
#include "support/require.h"
#include "support/run_ranks.h"

namespace fsdp::engine_device_test {
namespace {

using testing::run_ranks;

constexpr int64_t kWidth = 768;  // kernels long enough for communication to run beside them
constexpr int kUnits = 6;
constexpr int kSteps = 4;

struct BlockImpl : torch::nn::Module {
  explicit BlockImpl(int64_t hidden)
      : up(register_module("up", nn::Linear(kWidth, hidden))),
        down(register_module("down", torch::nn::Linear(hidden, kWidth))) {}
  at::Tensor forward(const at::Tensor& x) {
    const auto body = [this](const at::Tensor& h) { return down(at::gelu(up(h))); };
    return x + 0.1 * (recomputes ? recompute(body, x) : body(x));
  }
  nn::Linear up;
  torch::nn::Linear down;
  bool recomputes = false;
};
TORCH_MODULE(Block);

struct StackImpl : torch::nn::Module {
  StackImpl() {
    for (int i = 0; i < kUnits; ++i)
      blocks.push_back(register_module("block" + std::to_string(i),
                                       Unit<Block>(i % 2 == 0 ? 3 * kWidth : kWidth + 17)));
  }
  at::Tensor forward(at::Tensor x) {
    for (auto& block : blocks) x = block(x);
    return x;
  }
  std::vector<Unit<Block>> blocks;
};
TORCH_MODULE(Stack);

Stack make_stack(bool recomputes) {
  static std::mutex mutex;
  const std::lock_guard lock(mutex);
  torch::manual_seed(3);
  Stack stack;
  for (auto& block : stack->blocks) block->recomputes = recomputes;
  stack->to(at::kCUDA);
  return stack;
}

at::Tensor input_of(int rank, int step) {
  const at::Tensor row = at::arange(kWidth, at::device(at::kCUDA).dtype(at::kFloat));
  return at::sin(row.mul(0.01 * (rank + 1)).add(static_cast<double>(step))).expand({256, kWidth});
}

std::vector<at::Tensor> train_plain(int ranks) {
  Stack model = make_stack(false);
  for (int step = 0; step < kSteps; ++step) {
    model->zero_grad();
    for (int rank = 0; rank < ranks; ++rank)
      (model(input_of(rank, step)).square().mean() / ranks).backward();
    const at::NoGradGuard no_grad;
    for (at::Tensor& parameter : model->parameters()) parameter.sub_(parameter.grad(), 0.05);
  }
  std::vector<at::Tensor> weights;
  for (const at::Tensor& parameter : model->parameters()) weights.push_back(parameter.cpu());
  return weights;
}

using Case = std::tuple<std::string, int, int, PoolKind, bool>;
class OnDevice : public ::testing::TestWithParam<Case> {};

TEST_P(OnDevice, TrainsLikeAPlainModel) {
  FSDP_REQUIRE_GPU();
  const auto& [strategy, outer, inner, pool, recomputes] = GetParam();
  const std::vector<at::Tensor> expected = train_plain(outer * inner);
  run_ranks(outer * inner, [&](World& world) {
    const Mesh mesh = world.mesh({.outer = std::get<1>(GetParam())});
    Stack model = make_stack(std::get<4>(GetParam()));
    const Sharded sharded = fully_shard(model, mesh,
                                        {.strategy = parse_strategy(std::get<0>(GetParam())),
                                         .pool = std::get<3>(GetParam()),
                                         .gradient_lifetime = GradientLifetime::kStep});
    for (int step = 0; step < kSteps; ++step) {
      model(input_of(world.rank(), step)).square().mean().backward();
      for (const FlatShard& shard : sharded.flat_shards())
        shard.main_weight.sub_(shard.gradient, 0.05);
      EXPECT_FALSE(sharded.found_nonfinite());
      sharded.refresh_weights();
      sharded.zero_grad();
    }
    const auto whole = sharded.full_parameters();
    const std::vector<at::Tensor> actual = model->parameters();
    // The sums over ranks come in another order than the plain model's.
    for (size_t i = 0; i < expected.size(); ++i)
      EXPECT_TRUE(at::allclose(actual[i].cpu(), expected[i], 1e-4, 1e-6))
          << "rank " << world.rank() << " parameter " << i << " differs by "
          << (actual[i].cpu() - expected[i]).abs().max().item<float>();
  });
}

std::string name_of_case(const ::testing::TestParamInfo<Case>& info) {
  const auto& [strategy, outer, inner, pool, recomputes] = info.param;
  std::string name =
      concat(strategy, "_", outer, "x", inner, "_", name_of(pool), recomputes ? "_recompute" : "");
  for (char& c : name)
    if (std::isalnum(static_cast<unsigned char>(c)) == 0) c = '_';
  return name;
}

INSTANTIATE_TEST_SUITE_P(
    Strategies, OnDevice,
    ::testing::Combine(::testing::Values("no_shard", "optim", "optim_grads", "optim_grads_params",
                                         "optim_grads_params+hfsdp", "SS/SS/SS"),
                       ::testing::Values(1, 2), ::testing::Values(1, 2, 3),
                       ::testing::Values(PoolKind::kMaxPool), ::testing::Values(false)),
    name_of_case);

INSTANTIATE_TEST_SUITE_P(Pools, OnDevice,
                         ::testing::Combine(::testing::Values("optim_grads_params"),
                                            ::testing::Values(1), ::testing::Values(2, 3),
                                            ::testing::ValuesIn(all_pool_kinds()),
                                            ::testing::Bool()),
                         name_of_case);

// Autograd hands gradients over on the stream that was current in fully_shard(). Work that keeps
// that one busy would let reductions read gradients that have not come yet.
TEST(OnDevice, TrainsOnAStreamOfTheCaller) {
  FSDP_REQUIRE_GPU();
  for (const int ranks : {1, 2}) {
    const std::vector<at::Tensor> expected = train_plain(ranks);
    run_ranks(ranks, [&](World& world) {
      const Mesh mesh = world.mesh();
      Stack model = make_stack(false);
      const Sharded sharded = fully_shard(
          model, mesh,
          {.gradient_lifetime = GradientLifetime::kStep, .collectives = Collectives::kAlways});
      const at::Tensor large = at::ones({8192, 8192}, at::kCUDA);
      const c10::Device device = large.device();
      const c10::Stream stream =
          c10::impl::VirtualGuardImpl(at::kCUDA).getStreamFromGlobalPool(device);
      for (int step = 0; step < kSteps; ++step) {
        for (int i = 0; i < 3; ++i) at::mm(large, large);  // tens of milliseconds
        const c10::StreamGuard guard(stream);
        model(input_of(world.rank(), step)).square().mean().backward();
        for (const FlatShard& shard : sharded.flat_shards())
          shard.main_weight.sub_(shard.gradient, 0.05);
        sharded.refresh_weights();
        sharded.zero_grad();
      }
      const c10::StreamGuard guard(stream);
      const auto whole = sharded.full_parameters();
      const std::vector<at::Tensor> actual = model->parameters();
      for (size_t i = 0; i < expected.size(); ++i)
        EXPECT_TRUE(at::allclose(actual[i].cpu(), expected[i], 1e-4, 1e-6))
            << ranks << " ranks, parameter " << i;
    });
  }
}

// fp32 main gradients of bf16 weights: the product reaches them as the GPU has summed it.
TEST(OnDevice, RoundsNoWeightGradientBeforeItReachesItsMainGradient) {
  FSDP_REQUIRE_GPU();
  run_ranks(1, [](World& world) {
    const Mesh mesh = world.mesh();
    for (const Collectives collectives : {Collectives::kBetweenRanks, Collectives::kAlways}) {
      torch::manual_seed(5);
      Unit<nn::Linear> model(torch::nn::LinearOptions(96, 64).bias(false));
      model->to(at::kCUDA, at::kBFloat16);
      const Sharded sharded = fully_shard(
          model, mesh, {.precision = {.main_grads = at::kFloat}, .collectives = collectives});
      const auto bf16 = at::device(at::kCUDA).dtype(at::kBFloat16);
      at::Tensor expected;
      for (int microbatch = 0; microbatch < 2; ++microbatch) {
        const at::Tensor input = at::randn({128, 96}, bf16);
        const at::Tensor gradient = at::randn({128, 64}, bf16);
        sharded.microbatch({.last = microbatch == 1});
        model(input).backward(gradient);
        const at::Tensor product = at::mm(gradient.t(), input, at::kFloat);
        expected = expected.defined() ? expected + product : product;
      }
      const at::Tensor actual = sharded.parameters().front().gradient;
      ASSERT_EQ(actual.scalar_type(), at::kFloat);
      EXPECT_TRUE(at::equal(actual, expected.view(-1)));
      sharded.zero_grad();
    }
  });
}

}  // namespace
}  // namespace fsdp::engine_device_test
