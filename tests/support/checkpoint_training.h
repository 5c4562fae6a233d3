// Training that is saved and goes on elsewhere, for tests of checkpoints.
#pragma once

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "fsdp/checkpoint/checkpointer.h"
#include "support/optimizer_training.h"
#include "support/temp_dir.h"

namespace fsdp::testing {

// 19 -> 23 -> 27 -> ... -> 3: large enough for shards of bf16 weights to end in the middle of a
// row.
struct WideImpl : torch::nn::Module {
  explicit WideImpl(int num_units) {
    for (int i = 0; i < num_units; ++i) {
      const int64_t out = i + 1 == num_units ? 3 : 23 + 4 * i;
      units.push_back(register_module("unit" + std::to_string(i), Unit<Block>(19 + 4 * i, out)));
    }
  }
  at::Tensor forward(at::Tensor x) {
    for (Unit<Block>& unit : units) x = unit(x);
    return x;
  }
  std::vector<Unit<Block>> units;
};
TORCH_MODULE(Wide);

inline Wide make_wide(at::ScalarType dtype = at::kFloat, int num_units = kUnits,
                      c10::Device where = test_device()) {
  Wide model = build([&] { return Wide(num_units); });
  model->to(where, dtype);
  return model;
}

// Everything that is saved, whole: by parameter, and by parameter and moment.
using WholeState = std::map<std::string, at::Tensor>;

class StateCollector {
 public:
  void add(const Sharded& sharded, Optimizer& optimizer) {
    const std::lock_guard lock(mutex_);
    for (const ShardedParameter& each : sharded.parameters())
      put(each.name, each.shape, each.begin, each.main_weight);
    for (const OptimizerShard& each : optimizer.shards())
      put(each.parameter + "." + each.name, each.shape, each.begin, each.values);
  }
  WholeState take() { return std::move(whole_); }

 private:
  void put(const std::string& name, const std::vector<int64_t>& shape, int64_t begin,
           const at::Tensor& part) {
    at::Tensor& whole = whole_[name];
    if (!whole.defined()) whole = at::full(shape, NAN, part.options().device(at::kCPU));
    whole.view({-1}).narrow(0, begin, part.numel()).copy_(part);
  }

  std::mutex mutex_;
  WholeState whole_;
};

inline void expect_same_state(const WholeState& actual, const WholeState& expected,
                              const std::string& what) {
  ASSERT_EQ(actual.size(), expected.size()) << what;
  for (const auto& [name, value] : expected)
    EXPECT_TRUE(at::equal(actual.at(name), value.to(actual.at(name).scalar_type())))
        << what << " " << name << "\n"
        << actual.at(name) << "\n"
        << value;
}

// A rank of a training.
struct TrainingRank {
  World& world;
  const Mesh& mesh;
  Wide model;
  Sharded sharded;
  AdamW& optimizer;

  CheckpointState state() const { return {.sharded = sharded, .optimizer = &optimizer}; }

  at::Tensor input_of(int number) const {
    const at::Tensor parameter = model->parameters().front();
    return input_for(world.rank(), number, {2, 19}).to(parameter.device(), parameter.scalar_type());
  }
  void step(const at::Tensor& input) {
    model(input).to(at::kFloat).square().sum().backward();
    optimizer.step();
    optimizer.zero_grad();
  }
  void train(int first_step, int last_step) {
    for (int number = first_step; number < last_step; ++number) step(input_of(number));
  }
};

// Runs `body` on every rank of a new world and model; returns the final state.
inline WholeState run_training(const Training& run,
                               const std::function<void(TrainingRank&)>& body) {
  StateCollector collector;
  run_ranks(run.ranks, [&](World& world) {
    const Mesh mesh = world.mesh({.outer = run.outer});
    Wide model = make_wide(run.compute, kUnits, run.where);
    const Sharded sharded = fully_shard(model, mesh, run.shard);
    AdamW optimizer(sharded, run.adamw);
    TrainingRank rank{world, mesh, model, sharded, optimizer};
    body(rank);
    collector.add(sharded, optimizer);
  });
  return collector.take();
}

}  // namespace fsdp::testing
