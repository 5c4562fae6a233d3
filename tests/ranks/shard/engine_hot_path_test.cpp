// shard/: the memory operations of a step after the first ones.
#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <vector>

#include "fsdp/shard/fully_shard.h"
#include "fsdp/shard/unit.h"
#include "support/counted_news.h"
#include "support/counting_allocator.h"
#include "support/run_ranks.h"

namespace fsdp::engine_hot_path_test {
namespace {

using testing::CountingHostAllocator;
using testing::num_news;
using testing::run_ranks;

struct ScalesImpl : torch::nn::Module {
  explicit ScalesImpl(int num_parameters) {
    for (int i = 0; i < num_parameters; ++i)
      scales.push_back(register_parameter("scale" + std::to_string(i), at::ones({12})));
  }
  at::Tensor forward(const at::Tensor& x) {
    at::Tensor y = x;
    for (const at::Tensor& scale : scales) y = y * scale;
    return y;
  }
  std::vector<at::Tensor> scales;
};
TORCH_MODULE(Scales);

struct StackImpl : torch::nn::Module {
  StackImpl(int num_units, int num_parameters) {
    for (int i = 0; i < num_units; ++i)
      units.push_back(register_module("unit" + std::to_string(i), Unit<Scales>(num_parameters)));
  }
  at::Tensor forward(at::Tensor x) {
    for (Unit<Scales>& unit : units) x = unit(x);
    return x;
  }
  std::vector<Unit<Scales>> units;
};
TORCH_MODULE(Stack);

constexpr int kNumUnits = 6;

void step(Stack& model, const Sharded& sharded) {
  model(at::ones({12})).sum().backward();
  for (const FlatShard& shard : sharded.flat_shards()) shard.main_weight.sub_(shard.gradient, 0.1);
  sharded.refresh_weights();
  sharded.zero_grad();
}

struct HotPathCase {
  std::string strategy;
  int ranks;
};

class EngineHotPath : public ::testing::TestWithParam<HotPathCase> {};

TEST_P(EngineHotPath, TakesNothingFromTheAllocatorOnceTheOrderIsKnown) {
  for (const PoolKind pool : {PoolKind::kDoubleBuffer, PoolKind::kMaxPool, PoolKind::kPlanned}) {
    run_ranks(GetParam().ranks, [&](World& world) {
      const Mesh mesh = world.mesh();
      CountingHostAllocator allocator;
      Stack model(kNumUnits, 3);
      const Sharded sharded = fully_shard(
          model, mesh,
          {.strategy = parse_strategy(GetParam().strategy), .pool = pool, .allocator = &allocator});
      EXPECT_GT(allocator.num_allocations(), 0);
      for (int i = 0; i < 2; ++i) step(model, sharded);
      const int64_t before = allocator.num_allocations();
      for (int i = 0; i < 5; ++i) step(model, sharded);
      EXPECT_EQ(allocator.num_allocations() - before, 0) << name_of(pool);
    });
  }
}

// The heap requests of a rank's thread between two steps.
int64_t news_between_steps(World& world, const Strategy& strategy, int num_parameters) {
  const Mesh mesh = world.mesh();
  Stack model(kNumUnits, num_parameters);
  const Sharded sharded = fully_shard(model, mesh, {.strategy = strategy});
  for (int i = 0; i < 3; ++i) step(model, sharded);
  model(at::ones({12})).sum().backward();
  sharded.wait_gradients();
  const int64_t before = num_news();
  sharded.refresh_weights();
  sharded.zero_grad();
  return num_news() - before;
}

// Nothing is looked up by name either, which would hash or compare strings.
TEST_P(EngineHotPath, AsksTheHeapForNothingBetweenSteps) {
  run_ranks(GetParam().ranks, [&](World& world) {
    const Strategy strategy = parse_strategy(GetParam().strategy);
    EXPECT_EQ(news_between_steps(world, strategy, 10), 0);
    EXPECT_EQ(news_between_steps(world, strategy, 40), 0);
  });
}

INSTANTIATE_TEST_SUITE_P(
    All, EngineHotPath,
    ::testing::Values(HotPathCase{"no_shard", 1}, HotPathCase{"optim_grads_params", 1},
                      HotPathCase{"no_shard", 2}, HotPathCase{"optim", 2},
                      HotPathCase{"optim_grads", 2}, HotPathCase{"optim_grads_params", 2}),
    [](const auto& each) { return each.param.strategy + "_" + std::to_string(each.param.ranks); });

TEST(EngineHotPathCounter, CountsAllocationsWhenThereAreAny) {
  const int64_t before = num_news();
  const at::Tensor tensor = at::ones({12});
  EXPECT_GT(num_news() - before, 0);
}

}  // namespace
}  // namespace fsdp::engine_hot_path_test
