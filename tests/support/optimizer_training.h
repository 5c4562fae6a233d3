// Training with this library's optimizers, for tests that compare its outcomes.
#pragma once

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cmath>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "fsdp/optim/adamw.h"
#include "support/run_ranks.h"
#include "support/sharded_training.h"
#include "support/test_device.h"

namespace fsdp::testing {

inline constexpr int kUnits = 4;
inline constexpr int kSteps = 4;

inline Chain make_chain(at::ScalarType dtype = at::kFloat) {
  Chain model = build([] { return Chain(kUnits); });
  model->to(test_device(), dtype);
  return model;
}

inline at::Tensor loss_of(Chain& model, int rank, int step) {
  const at::ScalarType dtype = model->parameters().front().scalar_type();
  return model(input_for(rank, step).to(test_device(), dtype)).to(at::kFloat).square().sum();
}

struct Training {
  int ranks = 1;
  int outer = 1;
  at::ScalarType compute = at::kFloat;
  ShardOptions shard = {};
  AdamWOptions adamw = {.lr = 0.01};
  int microbatches = 1;
  c10::Device where = test_device();
};

struct Outcome {
  std::vector<at::Tensor> weights;                 // whole
  std::map<std::string, at::Tensor> main_weights;  // whole, by name
  std::vector<double> norms;                       // by step, if they were measured
};

// Main weights of all ranks, put together by every rank's offsets.
class MainWeightCollector {
 public:
  void add(const Sharded& sharded) {
    const std::lock_guard lock(mutex_);
    for (const ShardedParameter& parameter : sharded.parameters()) {
      at::Tensor& whole = whole_[parameter.name];
      if (!whole.defined()) {
        int64_t numel = 1;
        for (const int64_t size : parameter.shape) numel *= size;
        whole = at::full({numel}, NAN, parameter.main_weight.options());
      }
      whole.narrow(0, parameter.begin, parameter.main_weight.numel()).copy_(parameter.main_weight);
    }
  }
  std::map<std::string, at::Tensor> take() { return std::move(whole_); }

 private:
  std::mutex mutex_;
  std::map<std::string, at::Tensor> whole_;
};

inline Outcome train(const Training& run) {
  Outcome outcome;
  MainWeightCollector collector;
  run_ranks(run.ranks, [&](World& world) {
    const Mesh mesh = world.mesh({.outer = run.outer});
    Chain model = make_chain(run.compute);
    const Sharded sharded = fully_shard(model, mesh, run.shard);
    AdamW optimizer(sharded, run.adamw);
    std::vector<double> norms;
    for (int step = 0; step < kSteps; ++step) {
      for (int i = 0; i < run.microbatches; ++i) {
        sharded.microbatch({.last = i + 1 == run.microbatches});
        loss_of(model, world.rank(), step * run.microbatches + i).backward();
      }
      optimizer.step();
      optimizer.zero_grad();
      if (run.adamw.step.measures_norm) norms.push_back(optimizer.gradient_norm());
    }
    collector.add(sharded);
    const std::vector<at::Tensor> weights = weights_of(sharded, model);
    if (world.rank() == 0) outcome.weights = weights;
    if (world.rank() == 0) outcome.norms = norms;
  });
  outcome.main_weights = collector.take();
  return outcome;
}

inline void expect_same_bits(const Outcome& actual, const Outcome& expected,
                             const std::string& what) {
  expect_equal(actual.weights, expected.weights, what);
  ASSERT_EQ(actual.main_weights.size(), expected.main_weights.size());
  for (const auto& [name, value] : expected.main_weights)
    EXPECT_TRUE(at::equal(actual.main_weights.at(name), value)) << what << " " << name;
  EXPECT_EQ(actual.norms, expected.norms) << what;
}

inline const std::vector<std::string> kStrategies = {
    "no_shard", "optim", "optim_grads", "optim_grads_params", "optim_grads_params+hfsdp"};

}  // namespace fsdp::testing
