// Optimizers on sharded models against those of libtorch on plain ones.
#include <gtest/gtest.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/utils/clip_grad.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>

#include <cmath>

#include "fsdp/optim/sgd.h"
#include "support/optimizer_training.h"

namespace fsdp::optimizer_parity_test {
namespace {

using testing::Chain;
using testing::kSteps;
using testing::kStrategies;
using testing::loss_of;
using testing::MainWeightCollector;
using testing::make_chain;
using testing::Outcome;
using testing::run_ranks;
using testing::test_device;
using testing::train;
using testing::Training;

// The training with libtorch alone; gradients are the mean over ranks.
struct Plain {
  std::vector<at::Tensor> weights;
  std::vector<double> norms;
};

Plain train_plain(const Training& run) {
  Chain model = make_chain();
  const auto options =
      torch::optim::AdamWOptions(run.adamw.lr).weight_decay(run.adamw.weight_decay);
  torch::optim::AdamW optimizer(model->parameters(), options);
  Plain plain;
  for (int step = 0; step < kSteps; ++step) {
    for (int i = 0; i < run.microbatches; ++i)
      for (int rank = 0; rank < run.ranks; ++rank)
        (loss_of(model, rank, step * run.microbatches + i) / run.ranks).backward();
    double squared = 0;
    for (const at::Tensor& parameter : model->parameters())
      squared += parameter.grad().to(at::kDouble).square().sum().item<double>();
    plain.norms.push_back(std::sqrt(squared));
    if (run.adamw.step.max_norm > 0)
      torch::nn::utils::clip_grad_norm_(model->parameters(), run.adamw.step.max_norm);
    optimizer.step();
    optimizer.zero_grad();
  }
  plain.weights = model->parameters();
  return plain;
}

// Meshes on which a strategy makes sense.
std::vector<std::pair<int, int>> meshes_for(const std::string& strategy) {
  if (strategy.find("hfsdp") != std::string::npos) return {{4, 2}, {3, 3}};
  return {{1, 1}, {3, 1}, {4, 2}};
}

// --- against libtorch ----------------------------------------------------------------------------

struct Ulps {
  double of_large = 0;  // weights that are eight times their update or more
  double of_all = 0;
};

// One step from the same state, with the same gradient; returns the largest errors. Not always 0:
// libtorch's vector kernels contract m * beta + g * (1 - beta) into one rounding where the
// processor can, and divide twice per element where we divide once. So an ulp is that of the
// largest number that takes part: a weight that was as large as its update has lost its leading
// bits, and so has a moment that was as large as its gradient.
Ulps ulps_from_libtorch(double rate) {
  Ulps worst;
  run_ranks(1, [&](World& world) {
    const Mesh mesh = world.mesh();
    Chain model = make_chain();
    const Sharded sharded = fully_shard(model, mesh);
    AdamW ours(sharded, {.lr = rate, .decay_spares_vectors = false});
    std::vector<at::Tensor> theirs;
    for (const ShardedParameter& parameter : sharded.parameters())
      theirs.push_back(parameter.main_weight.clone());
    torch::optim::AdamW libtorch(theirs, torch::optim::AdamWOptions(rate).weight_decay(0.01));
    const auto moments_of = [&](size_t i) -> torch::optim::AdamWParamState& {
      return static_cast<torch::optim::AdamWParamState&>(
          *libtorch.state().at(theirs[i].unsafeGetTensorImpl()));
    };
    for (int step = 1; step <= 20; ++step) {
      loss_of(model, 0, step).backward();
      std::vector<ShardedParameter> now = sharded.parameters();
      std::vector<at::Tensor> before;
      std::vector<at::Tensor> terms;  // of the first moment
      for (size_t i = 0; i < now.size(); ++i) {
        theirs[i].mutable_grad() = now[i].gradient.clone();
        before.push_back(theirs[i].clone());
        terms.push_back(now[i].gradient.abs() * 0.1);
        if (step > 1) terms[i] += moments_of(i).exp_avg().abs() * 0.9;
      }
      libtorch.step();
      ours.step();
      ours.zero_grad();
      now = sharded.parameters();
      const std::vector<OptimizerShard> moments = ours.shards();
      for (size_t i = 0; i < now.size(); ++i) {
        auto& state = moments_of(i);
        const at::Tensor root = (state.exp_avg_sq() / (1 - std::pow(0.999, step))).sqrt() + 1e-8;
        const at::Tensor update = rate / (1 - std::pow(0.9, step)) * terms[i] / root;
        const at::Tensor size =
            at::maximum(at::maximum(before[i].abs(), now[i].main_weight.abs()), update);
        const at::Tensor ulp = at::nextafter(size, at::full_like(size, INFINITY)) - size;
        const at::Tensor error = (now[i].main_weight - theirs[i]).abs();
        const at::Tensor ulps = error / ulp;
        const at::Tensor is_large = before[i].abs() >= 8 * update;
        worst.of_all = std::max(worst.of_all, ulps.max().item<double>());
        worst.of_large = std::max(worst.of_large, (ulps * is_large).max().item<double>());
        // The next step begins from the same state again.
        theirs[i].copy_(now[i].main_weight);
        for (const OptimizerShard& shard : moments)
          if (shard.parameter == now[i].name)
            (shard.name == "exp_avg" ? state.exp_avg() : state.exp_avg_sq()).copy_(shard.values);
      }
    }
  });
  return worst;
}

TEST(AdamWOnOneRank, IsWithinOneUlpOfLibtorchPerStep) {
  for (const double rate : {1e-4, 1e-3, 1e-2}) {
    const Ulps ulps = ulps_from_libtorch(rate);
    EXPECT_LE(ulps.of_large, 1.0);
    // The update's own rounding shows: seven times half an ulp on both sides.
    EXPECT_LE(ulps.of_all, 4.0);
  }
}

class Strategies : public ::testing::TestWithParam<std::string> {};

TEST_P(Strategies, TrainAsLibtorchWithClippingDoes) {
  for (const auto& [ranks, outer] : meshes_for(GetParam()))
    for (const int microbatches : {1, 3}) {
      if ((microbatches == 1) == (ranks > 1)) continue;
      SCOPED_TRACE(::testing::Message() << ranks << " ranks, outer " << outer << ", "
                                        << microbatches << " microbatches");
      Training run{.ranks = ranks, .outer = outer, .microbatches = microbatches};
      run.shard.strategy = parse_strategy(GetParam());
      run.adamw.decay_spares_vectors = false;
      run.adamw.step = {.max_norm = 0.5, .measures_norm = true};
      const Outcome actual = train(run);
      const Plain plain = train_plain(run);
      testing::expect_close(actual.weights, plain.weights);
      ASSERT_EQ(actual.norms.size(), plain.norms.size());
      for (size_t i = 0; i < plain.norms.size(); ++i) {
        EXPECT_GT(plain.norms[i], 0.5) << "or nothing is clipped";
        EXPECT_NEAR(actual.norms[i], plain.norms[i], 1e-5 * plain.norms[i]) << "step " << i;
      }
    }
}

// The optimizer sees elements, not parameters, so cuts change nothing. (Gradients are equal bit by
// bit because every rank computes the same loss here.)
TEST_P(Strategies, UpdateAShardAsTheShardOfTheUpdate) {
  const auto with_equal_data = [&](int ranks, int outer, const AdamWOptions& adamw) {
    MainWeightCollector collector;
    run_ranks(ranks, [&](World& world) {
      const Mesh mesh = world.mesh({.outer = outer});
      Chain model = make_chain(at::kBFloat16);
      ShardOptions options{.strategy = parse_strategy(GetParam())};
      options.precision.main_grads = at::kFloat;
      options.gradient = GradientOf::kSumOverRanks;
      const Sharded sharded = fully_shard(model, mesh, options);
      AdamW optimizer(sharded, adamw);
      for (int step = 0; step < kSteps; ++step) {
        // Halves of a power of two: a sum of equal parts is exact.
        (loss_of(model, 0, step) / ranks).backward();
        optimizer.step();
        optimizer.zero_grad();
      }
      collector.add(sharded);
    });
    return collector.take();
  };
  for (const AdamWOptions& adamw :
       {AdamWOptions{.lr = 0.01},
        AdamWOptions{.lr = 0.01, .first_moment = at::kBFloat16, .second_moment = at::kBFloat16}}) {
    const auto expected = with_equal_data(1, 1, adamw);
    for (const auto& [ranks, outer] : {std::pair(2, 1), std::pair(4, 2)}) {
      const bool shards_outer = GetParam().find("hfsdp") != std::string::npos;
      if (shards_outer && outer == 1) continue;
      const auto actual = with_equal_data(ranks, outer, adamw);
      for (const auto& [name, value] : expected)
        EXPECT_TRUE(at::equal(actual.at(name), value)) << name << " on " << ranks;
    }
  }
}

// --- shared weights ------------------------------------------------------------------------------

struct SharedHeadImpl : torch::nn::Module {
  void share(const at::Tensor& other) { weight = register_parameter("weight", other); }
  at::Tensor forward(const at::Tensor& x) { return at::linear(x, weight); }
  at::Tensor weight;
};
TORCH_MODULE(SharedHead);

struct TiedImpl : torch::nn::Module {
  TiedImpl()
      : embedding(register_module("embedding", Unit<torch::nn::Embedding>(11, 6))),
        head(register_module("head", Unit<SharedHead>())) {
    head->share(embedding->weight);
  }
  at::Tensor forward(const at::Tensor& tokens) { return head(at::tanh(embedding(tokens))); }
  Unit<torch::nn::Embedding> embedding;
  Unit<SharedHead> head;
};
TORCH_MODULE(Tied);

TEST_P(Strategies, CountASharedWeightOnceInTheNorm) {
  const auto loss_on = [](Tied& model, int rank) {
    return model(((at::arange(5) * (rank + 2)) % 11).to(test_device())).square().sum();
  };
  const auto make = [] {
    Tied model = testing::build([] { return Tied(); });
    model->to(test_device());
    return model;
  };
  for (const auto& [ranks, outer] : meshes_for(GetParam())) {
    Tied plain = make();
    for (int rank = 0; rank < ranks; ++rank) (loss_on(plain, rank) / ranks).backward();
    const double expected = plain->embedding->weight.grad().norm().item<double>();
    run_ranks(ranks, [&, outer = outer](World& world) {
      const Mesh mesh = world.mesh({.outer = outer});
      Tied model = make();
      const Sharded sharded = fully_shard(model, mesh, {.strategy = parse_strategy(GetParam())});
      AdamW optimizer(sharded, {.step = {.measures_norm = true}});
      loss_on(model, world.rank()).backward();
      optimizer.step();
      EXPECT_NEAR(optimizer.gradient_norm(), expected, 1e-5 * expected) << ranks << " ranks";
    });
  }
}

INSTANTIATE_TEST_SUITE_P(Named, Strategies, ::testing::ValuesIn(kStrategies), [](const auto& each) {
  std::string name = each.param;
  std::replace(name.begin(), name.end(), '+', '_');
  return name;
});

TEST(SGD, TrainsAsLibtorchDoes) {
  for (const bool nesterov : {false, true})
    for (const double momentum : {0.0, 0.9}) {
      if (nesterov && momentum == 0.0) continue;
      Chain plain = make_chain();
      torch::optim::SGD expected(
          plain->parameters(),
          torch::optim::SGDOptions(0.05).momentum(momentum).nesterov(nesterov).weight_decay(0.02));
      for (int step = 0; step < kSteps; ++step) {
        for (int rank = 0; rank < 3; ++rank) (loss_of(plain, rank, step) / 3).backward();
        expected.step();
        expected.zero_grad();
      }
      run_ranks(3, [&](World& world) {
        const Mesh mesh = world.mesh();
        Chain model = make_chain();
        const Sharded sharded = fully_shard(model, mesh);
        SGD optimizer(sharded, {.lr = 0.05,
                                .momentum = momentum,
                                .nesterov = nesterov,
                                .weight_decay = 0.02,
                                .decay_spares_vectors = false});
        for (int step = 0; step < kSteps; ++step) {
          loss_of(model, world.rank(), step).backward();
          optimizer.step();
          optimizer.zero_grad();
        }
        testing::expect_close(testing::weights_of(sharded, model), plain->parameters());
      });
    }
}

}  // namespace
}  // namespace fsdp::optimizer_parity_test
