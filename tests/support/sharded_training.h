// Models and loops that the tests of sharded training share.
#pragma once

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/linear.h>
#include <torch/utils.h>

#include <functional>
#include <mutex>
#include <string>
#include <vector>

#include "fsdp/shard/fully_shard.h"
#include "fsdp/shard/unit.h"
#include "support/error_of.h"
#include "support/run_ranks.h"

namespace fsdp::testing {

// One for all models; a static of the template below would be one per kind of model.
inline std::mutex& generator_in_use() {
  static std::mutex mutex;
  return mutex;
}

// Ranks are threads and share the generator, so they build their models one after the other.
template <typename Make>
auto build(const Make& make, uint64_t seed = 7) {
  const std::lock_guard lock(generator_in_use());
  torch::manual_seed(seed);
  return make();
}

// Different for every rank and step, and no random numbers.
inline at::Tensor input_for(int rank, int step, at::IntArrayRef shape = {2, 5}) {
  int64_t numel = 1;
  for (const int64_t size : shape) numel *= size;
  return at::sin(at::arange(numel, at::kFloat) * 0.7 + (1.3 * rank + 0.9 * step)).view(shape);
}

struct BlockImpl : torch::nn::Module {
  BlockImpl(int64_t in, int64_t out)
      : linear(register_module("linear", torch::nn::Linear(in, out))) {}
  at::Tensor forward(const at::Tensor& x) {
    if (inside) inside(*this);
    return at::tanh(linear(x));
  }
  torch::nn::Linear linear;
  std::function<void(BlockImpl&)> inside;  // called where the parameters are whole
};
TORCH_MODULE(Block);

// A chain of units, 5 -> 7 -> ... -> 7 -> 3.
struct ChainImpl : torch::nn::Module {
  explicit ChainImpl(int num_units) {
    for (int i = 0; i < num_units; ++i) {
      const int64_t in = i == 0 ? 5 : 7;
      const int64_t out = i + 1 == num_units ? 3 : 7;
      units.push_back(register_module("unit" + std::to_string(i), Unit<Block>(in, out)));
    }
  }
  at::Tensor forward(at::Tensor x) {
    for (Unit<Block>& unit : units) x = unit(x);
    return x;
  }
  std::vector<Unit<Block>> units;
};
TORCH_MODULE(Chain);

// Calls `body(model, sharded, rank)` on each of `ranks` ranks, with a model that is sharded over
// them.
template <typename Make, typename Body>
void on_sharded(int ranks, const Make& make, const ShardOptions& options, const Body& body) {
  run_ranks(ranks, [&](World& world) {
    const Mesh mesh = world.mesh();
    auto model = build(make);
    Sharded sharded = fully_shard(model, mesh, options);
    body(model, sharded, world.rank());
  });
}

// A chain of three units.
template <typename Body>
void on_sharded_chain(int ranks, const ShardOptions& options, const Body& body) {
  on_sharded(
      ranks, [] { return Chain(3); }, options, body);
}

inline constexpr double kRate = 0.1;

// One step of gradient descent on the main weights, and the end of the cycle.
inline void descend(const Sharded& sharded) {
  for (const FlatShard& shard : sharded.flat_shards())
    shard.main_weight.sub_(shard.gradient, kRate);
  sharded.refresh_weights();
  sharded.zero_grad();
}

// Copies of all parameters, whole.
template <typename Model>
std::vector<at::Tensor> weights_of(const Sharded& sharded, Model& model) {
  const auto whole = sharded.full_parameters();
  std::vector<at::Tensor> copies;
  for (const at::Tensor& parameter : model->parameters()) copies.push_back(parameter.clone());
  return copies;
}

// The training without sharding: `loss(model, rank, step)` of all ranks, averaged.
template <typename Model, typename Loss>
std::vector<at::Tensor> train_plain(Model model, int ranks, int steps, const Loss& loss) {
  for (int step = 0; step < steps; ++step) {
    for (int rank = 0; rank < ranks; ++rank)
      (loss(model, rank, step) / static_cast<double>(ranks)).backward();
    const at::NoGradGuard no_grad;
    for (at::Tensor& parameter : model->parameters()) {
      if (parameter.grad().defined()) parameter.sub_(parameter.grad(), kRate);
      parameter.mutable_grad() = at::Tensor();
    }
  }
  return model->parameters();
}

template <typename Model, typename Loss>
void train(Model& model, const Sharded& sharded, int rank, int steps, const Loss& loss) {
  for (int step = 0; step < steps; ++step) {
    loss(model, rank, step).backward();
    descend(sharded);
  }
}

inline void expect_equal(const std::vector<at::Tensor>& actual,
                         const std::vector<at::Tensor>& expected, const std::string& what = {}) {
  ASSERT_EQ(actual.size(), expected.size()) << what;
  for (size_t i = 0; i < actual.size(); ++i)
    EXPECT_TRUE(at::equal(actual[i], expected[i])) << what << " parameter " << i << "\n"
                                                   << actual[i] << "\n"
                                                   << expected[i];
}

// Sums over ranks are wide and rounded once, unlike those of the plain model.
inline void expect_close(const std::vector<at::Tensor>& actual,
                         const std::vector<at::Tensor>& expected, const std::string& what = {}) {
  ASSERT_EQ(actual.size(), expected.size()) << what;
  for (size_t i = 0; i < actual.size(); ++i)
    EXPECT_TRUE(at::allclose(actual[i], expected[i], 1e-5, 1e-6))
        << what << " parameter " << i << "\n"
        << actual[i] << "\n"
        << expected[i];
}

}  // namespace fsdp::testing
