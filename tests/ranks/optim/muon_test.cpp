// Muon: the numbers of a plain loop, the same on any ranks, and what it refuses.
#include "fsdp/optim/muon.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/adamw.h>

#include <cmath>
#include <map>
#include <string>

#include "fsdp/base/text.h"
#include "fsdp/checkpoint/checkpointer.h"
#include "fsdp/optim/matrix_updates.h"
#include "fsdp/shard/fully_shard.h"
#include "support/one_in.h"
#include "support/optimizer_training.h"
#include "support/temp_dir.h"

namespace fsdp::muon_test {
namespace {

using testing::build;
using testing::error_of;
using ::testing::HasSubstr;
using testing::input_for;
using testing::MainWeightCollector;
using testing::run_ranks;
using testing::TempDir;
using testing::test_device;

// Wide, tall, square and fused matrices, and vectors.
struct LayerImpl : torch::nn::Module {
  at::Tensor forward(const at::Tensor& x) {
    const at::Tensor mixed = at::tanh(at::linear(x, fused));  // [.., 96]
    return x + mixed.narrow(-1, 0, 32) + down(mixed.narrow(-1, 32, 64) * up(x));
  }
  torch::nn::Linear up = register_module("up", torch::nn::Linear(32, 64));
  torch::nn::Linear down = register_module("down", torch::nn::Linear(64, 32));
  at::Tensor fused = register_parameter("fused", at::randn({96, 32}) * 0.1);
};
TORCH_MODULE(Layer);

struct NetImpl : torch::nn::Module {
  at::Tensor forward(const at::Tensor& x) { return second(first(embed(x))); }
  torch::nn::Linear embed = register_module("embed", torch::nn::Linear(5, 32));
  Unit<Layer> first = register_module("first", Unit<Layer>());
  Unit<Layer> second = register_module("second", Unit<Layer>());
};
TORCH_MODULE(Net);

const WholeMatrices kMatrices{.named = {{.pattern = "*.fused", .rows = {32, 64}}, {"*.weight"}},
                              .except = {"embed.*"}};
// Rows of the matrices that one name stands for.
std::map<std::string, std::vector<int64_t>> rows_of_matrices() {
  std::map<std::string, std::vector<int64_t>> rows;
  for (const char* layer : {"first", "second"}) {
    rows[concat(layer, ".fused")] = {32, 64};
    rows[concat(layer, ".up.weight")] = {64};
    rows[concat(layer, ".down.weight")] = {32};
  }
  return rows;
}

Net make_net(at::ScalarType dtype = at::kFloat) {
  Net model = build([] { return Net(); });
  model->to(test_device(), dtype);
  return model;
}

at::Tensor loss_of(Net& model, int rank, int step) {
  const at::ScalarType dtype = model->parameters().front().scalar_type();
  return model(input_for(rank, step).to(test_device(), dtype)).to(at::kFloat).square().mean();
}

constexpr int kSteps = 4;

struct Training {
  int ranks = 1;
  int outer = 1;
  at::ScalarType compute = at::kFloat;
  ShardOptions shard = {.matrices = kMatrices};
  MuonOptions muon = {.lr = 0.02};
};

std::map<std::string, at::Tensor> train(const Training& run) {
  MainWeightCollector collector;
  run_ranks(run.ranks, [&](World& world) {
    const Mesh mesh = world.mesh({.outer = run.outer});
    Net model = make_net(run.compute);
    const Sharded sharded = fully_shard(model, mesh, run.shard);
    Muon optimizer(sharded, run.muon);
    for (int step = 0; step < kSteps; ++step) {
      optimizer.scaled(loss_of(model, world.rank(), step)).backward();
      optimizer.step();
      optimizer.zero_grad();
    }
    collector.add(sharded);
  });
  return collector.take();
}

void expect_same_bits(const std::map<std::string, at::Tensor>& actual,
                      const std::map<std::string, at::Tensor>& expected, const std::string& what) {
  ASSERT_EQ(actual.size(), expected.size()) << what;
  for (const auto& [name, value] : expected)
    EXPECT_TRUE(at::equal(actual.at(name), value)) << what << " " << name;
}

// --- the numbers ---------------------------------------------------------------------------------

at::Tensor plain_orthogonal(const at::Tensor& update, const MuonOptions& o) {
  at::Tensor x = update.to(at::kDouble);
  x = x / x.norm().clamp_min(o.norm_eps);
  for (int i = 0; i < o.iterations; ++i) {
    const at::Tensor gram = x.matmul(x.t());
    x = o.a * x + (o.b * gram + o.c * gram.matmul(gram)).matmul(x);
  }
  return x;
}

// Muon as its papers have it, one matrix at a time and in fp64, beside libtorch's AdamW.
std::map<std::string, at::Tensor> train_plainly(const MuonOptions& o) {
  Net model = make_net();
  const auto matrices = rows_of_matrices();
  std::map<std::string, at::Tensor> momenta;
  std::vector<at::Tensor> decaying;
  std::vector<at::Tensor> vectors;
  for (const auto& item : model->named_parameters())
    if (!matrices.contains(item.key()))
      (item.value().dim() < 2 ? vectors : decaying).push_back(item.value());
  using torch::optim::AdamWOptions;
  const auto options = [&](double decay) {
    return AdamWOptions(o.lr * o.adamw_rate_scale)
        .betas({o.beta1, o.beta2})
        .eps(o.eps)
        .weight_decay(decay);
  };
  torch::optim::AdamW adamw(decaying, options(o.weight_decay));
  adamw.add_param_group({vectors, std::make_unique<AdamWOptions>(options(0.0))});
  for (int step = 0; step < kSteps; ++step) {
    model->zero_grad();
    loss_of(model, 0, step).backward();
    adamw.step();
    const at::NoGradGuard no_grad;
    for (const auto& [name, rows] : matrices) {
      const at::Tensor weight = *model->named_parameters().find(name);
      int64_t begin = 0;
      for (const int64_t count : rows) {
        at::Tensor w = weight.narrow(0, begin, count);
        const at::Tensor g = weight.grad().narrow(0, begin, count);
        at::Tensor& m = momenta[concat(name, begin)];
        if (!m.defined()) m = at::zeros_like(g);
        m.mul_(o.momentum).add_(g, 1.0 - o.momentum);
        const at::Tensor direction =
            plain_orthogonal(o.nesterov ? g * (1.0 - o.momentum) + m * o.momentum : m, o);
        w.mul_(1.0 - o.lr * o.weight_decay)
            .add_(direction, -o.lr * matrix_rate_scale(o.scale, count, w.size(1)));
        begin += count;
      }
    }
  }
  std::map<std::string, at::Tensor> weights;
  for (const auto& item : model->named_parameters())
    weights[item.key()] = item.value().detach().reshape({-1});
  return weights;
}

TEST(Muon, HasTheNumbersOfAPlainLoop) {
  if (!test_device().is_cpu()) GTEST_SKIP() << "the plain loop computes on a CPU";
  std::vector<MuonOptions> cases = {{.lr = 0.02, .a = 1.5, .b = -0.5, .c = 0.0}};  // no square
  for (const MuonScale scale : {MuonScale::kOriginal, MuonScale::kMatchAdamW})
    for (const bool nesterov : {true, false})
      cases.push_back({.lr = 0.02, .adamw_rate_scale = 0.25, .nesterov = nesterov, .scale = scale});
  for (const MuonOptions& options : cases) {
    const auto plain = train_plainly(options);
    const auto sharded = train({.muon = options});
    ASSERT_EQ(sharded.size(), plain.size());
    // fp32 products of up to 64 terms, five iterations that enlarge small differences up to 3.4445
    // times each, and four steps.
    for (const auto& [name, value] : plain)
      EXPECT_LT((sharded.at(name) - value).abs().max().item<double>(), 2e-4) << name;
    const at::Tensor before = make_net()->second->up->weight.detach().reshape({-1});
    EXPECT_GT((plain.at("second.up.weight") - before).abs().max().item<double>(), 2e-3);
  }
}

TEST(Muon, MovesAsFarAsTheShapeSays) {
  EXPECT_DOUBLE_EQ(matrix_rate_scale(MuonScale::kOriginal, 100, 400), 1.0);
  EXPECT_DOUBLE_EQ(matrix_rate_scale(MuonScale::kOriginal, 400, 100), 2.0);
  EXPECT_DOUBLE_EQ(matrix_rate_scale(MuonScale::kMatchAdamW, 100, 400), 4.0);
  EXPECT_DOUBLE_EQ(matrix_rate_scale(MuonScale::kMatchAdamW, 400, 100), 4.0);
}

TEST(Muon, BatchedProductsAreTheSameNumbers) {
  MuonOptions options{.lr = 0.02, .products_dtype = at::kFloat};
  const auto expected = train({.muon = options});
  options.products = MuonProducts::kBatched;
  for (const auto& [name, value] : train({.muon = options}))
    EXPECT_LT((value - expected.at(name)).abs().max().item<double>(), 2e-4) << name;
}

TEST(Muon, NarrowProductsStayNear) {
  const auto expected = train({.muon = {.lr = 0.02, .products_dtype = at::kFloat}});
  const auto narrow = train({.muon = {.lr = 0.02, .products_dtype = at::kBFloat16}});
  const Net before = make_net();
  for (const auto& item : before->named_parameters()) {
    const at::Tensor& value = expected.at(item.key());
    const double moved = (value - item.value().detach().reshape({-1})).norm().item<double>();
    const double apart = (narrow.at(item.key()) - value).norm().item<double>();
    // Gradients of a few rows have few directions, and five iterations enlarge the roundings of all
    // others up to 3.4445^5 times: directions that differ by a third are usual in bf16 (as far is
    // torch.optim.Muon), and those of another gradient would be 1.4 apart.
    EXPECT_LT(apart, 0.5 * moved) << item.key();
    EXPECT_GT(moved, 0.0) << item.key();
  }
}

// --- any ranks -----------------------------------------------------------------------------------

TEST(Muon, IsTheSameForEveryStrategyBitByBit) {
  testing::OneIn few(3);
  for (const auto& [ranks, outer] : {std::pair{1, 1}, {3, 1}, {8, 1}, {4, 2}, {6, 2}}) {
    Training run{.ranks = ranks, .outer = outer};
    run.shard.strategy = Strategy::no_shard;
    const auto unsharded = train(run);
    for (const std::string& strategy : testing::kStrategies) {
      if (few.skips()) continue;
      run.shard.strategy = parse_strategy(strategy);
      expect_same_bits(train(run), unsharded, concat(ranks, " ranks ", strategy));
    }
  }
}

TEST(Muon, IsTheSameForEveryTypeAndTimeOfUpdates) {
  struct Types {
    at::ScalarType compute;
    std::optional<at::ScalarType> main;
    MainStorage storage;
    at::ScalarType momentum;
  };
  for (const Types& types :
       {Types{at::kBFloat16, at::kFloat, MainStorage::kSplit, at::kFloat},
        Types{at::kBFloat16, at::kFloat, MainStorage::kSeparate, at::kBFloat16},
        Types{at::kBFloat16, std::nullopt, MainStorage::kSplit, at::kHalf},
        Types{at::kFloat, at::kFloat, MainStorage::kSplit, at::kBFloat16}}) {
    Training run{.ranks = 3, .compute = types.compute};
    run.shard.precision = {.main_params = types.main, .main_storage = types.storage};
    run.muon.momentum_dtype = types.momentum;
    run.muon.step.rounding = types.main ? Rounding::kNearest : Rounding::kStochastic;
    run.shard.strategy = Strategy::no_shard;
    const auto unsharded = train(run);
    run.shard.strategy = Strategy::optim_grads_params;
    expect_same_bits(train(run), unsharded, "hidden");
    run.muon.step.updates = Updates::kBlocking;
    expect_same_bits(train(run), unsharded, "blocking");
    if (types.main != at::kFloat || types.compute == at::kFloat) continue;
    // Split and separate main weights are the same numbers.
    run.shard.precision.main_storage = MainStorage::kSeparate;
    expect_same_bits(train(run), unsharded, "separate");
  }
}

// --- the step as a whole -------------------------------------------------------------------------

TEST(Muon, ScalesOfTheLossChangeNothing) {
  Training scaled{.ranks = 2};
  scaled.muon.step.loss_scale = LossScale::fixed(1024.0);
  // AdamW's epsilon is the only number that does not scale, and powers of two are exact.
  expect_same_bits(train(scaled), train({.ranks = 2}), "scaled");
}

TEST(Muon, ClippingDoesNotTurnDirections) {
  // Every gradient of a step has the same factor, but the momentum mixes steps: one step.
  const auto one_step = [](double max_norm) {
    at::Tensor weight;
    run_ranks(2, [&](World& world) {
      const Mesh mesh = world.mesh();
      Net model = make_net();
      const Sharded sharded = fully_shard(model, mesh, {.matrices = kMatrices});
      Muon optimizer(sharded,
                     {.lr = 0.02, .products_dtype = at::kFloat, .step = {.max_norm = max_norm}});
      loss_of(model, world.rank(), 0).backward();
      optimizer.step();
      const auto whole = sharded.full_parameters();
      if (world.rank() == 0) weight = model->first->fused.detach().clone();
    });
    return weight;
  };
  const at::Tensor clipped = one_step(1e-3);
  const at::Tensor free = one_step(0.0);
  EXPECT_LT((clipped - free).abs().max().item<double>(), 1e-4);
}

TEST(Muon, SkipsAStepThatIsNotFinite) {
  run_ranks(2, [&](World& world) {
    const Mesh mesh = world.mesh();
    Net model = make_net();
    const Sharded sharded = fully_shard(model, mesh, {.matrices = kMatrices});
    Muon optimizer(sharded, {.lr = 0.02, .step = {.on_nonfinite = OnNonfinite::kSkip}});
    const auto take = [&](double factor) {
      (loss_of(model, world.rank(), 0) * factor).backward();
      optimizer.step();
      optimizer.zero_grad();
    };
    const auto state = [&] {
      std::vector<at::Tensor> all;
      for (const OptimizerShard& shard : optimizer.shards()) all.push_back(shard.values);
      for (const ShardedParameter& each : sharded.parameters())
        all.push_back(each.main_weight.clone());
      return all;
    };
    take(1.0);
    const std::vector<at::Tensor> before = state();
    take(world.rank() == 1 ? NAN : 1.0);
    EXPECT_TRUE(optimizer.was_skipped());
    testing::expect_equal(state(), before);
    take(1.0);
    EXPECT_FALSE(optimizer.was_skipped());
  });
}

TEST(Muon, RulesReachMatricesAndOthers) {
  Training run{.ranks = 2};
  run.muon.rules = {{.pattern = "first.*", .rate_scale = 0.0},
                    {.pattern = "embed.*", .rate_scale = 0.0}};
  const auto trained = train(run);
  const Net start = make_net();
  for (const auto& item : start->named_parameters()) {
    const bool is_frozen = item.key().starts_with("first.") || item.key().starts_with("embed.");
    EXPECT_EQ(at::equal(trained.at(item.key()), item.value().detach().reshape({-1})), is_frozen)
        << item.key();
  }
}

// --- state ---------------------------------------------------------------------------------------

TEST(Muon, KeepsOneMomentumOfMatricesAndTwoMomentsOfTheRest) {
  run_ranks(3, [&](World& world) {
    const Mesh mesh = world.mesh();
    Net model = make_net();
    const Sharded sharded = fully_shard(model, mesh, {.matrices = kMatrices});
    const Muon optimizer(sharded);
    const auto matrices = rows_of_matrices();
    for (const OptimizerShard& shard : optimizer.shards())
      EXPECT_EQ(shard.name == "momentum_buffer", matrices.contains(shard.parameter))
          << shard.parameter << " " << shard.name;
    EXPECT_EQ(optimizer.shards().size(), 6u + 2u * 6u);
    EXPECT_GT(sharded.memory().workspace_bytes, 0);
  });
}

// Every rank has the same batch, and means of two or four equal numbers are exact.
TEST(Muon, TrainsOnAfterAResumeOnOtherRanksBitByBit) {
  const auto steps = [](Net& model, Muon& optimizer, int begin, int end) {
    for (int step = begin; step < end; ++step) {
      loss_of(model, 0, step).backward();
      optimizer.step();
      optimizer.zero_grad();
    }
    optimizer.wait();
  };
  const auto with_ranks = [&](int ranks, const Strategy& strategy, const auto& run) {
    MainWeightCollector weights;
    run_ranks(ranks, [&](World& world) {
      const Mesh mesh = world.mesh();
      Net model = make_net();
      const Sharded sharded =
          fully_shard(model, mesh, {.strategy = strategy, .matrices = kMatrices});
      Muon optimizer(sharded, {.lr = 0.02});
      run(mesh, model, sharded, optimizer);
      weights.add(sharded);
    });
    return weights.take();
  };
  const auto straight = with_ranks(
      1, Strategy::no_shard,
      [&](const Mesh&, Net& model, const Sharded&, Muon& muon) { steps(model, muon, 0, kSteps); });
  // The ranks of the middle load and save; a mean of three would be rounded.
  for (const std::vector<int>& ranks : {std::vector{4, 1}, {2, 3, 4}, {1, 8, 2}}) {
    const TempDir folder;
    const auto save = [&](const Sharded& sharded, Muon& muon) {
      EXPECT_EQ(muon.state().step, 2);
      save_checkpoint(folder.path(), {.sharded = sharded, .optimizer = &muon}, {.step = 2});
    };
    const auto load = [&](const Mesh& mesh, const Sharded& sharded, Muon& muon) {
      Checkpointer checkpointer(folder.path(), mesh);
      ASSERT_TRUE(checkpointer.load_latest({.sharded = sharded, .optimizer = &muon}));
    };
    with_ranks(ranks.front(), Strategy::optim_grads_params,
               [&](const Mesh&, Net& model, const Sharded& sharded, Muon& muon) {
                 steps(model, muon, 0, 2);
                 save(sharded, muon);
               });
    for (size_t i = 1; i + 1 < ranks.size(); ++i)
      with_ranks(ranks[i], Strategy::optim,
                 [&](const Mesh& mesh, Net&, const Sharded& sharded, Muon& muon) {
                   load(mesh, sharded, muon);
                   save(sharded, muon);
                 });
    const auto resumed =
        with_ranks(ranks.back(), Strategy::optim_grads,
                   [&](const Mesh& mesh, Net& model, const Sharded& sharded, Muon& muon) {
                     load(mesh, sharded, muon);
                     steps(model, muon, 2, kSteps);
                   });
    expect_same_bits(resumed, straight, concat("ranks ", ranks));
  }
}

// --- errors --------------------------------------------------------------------------------------

std::string refusal(const ShardOptions& shard, const MuonOptions& muon = {}) {
  std::string error;
  run_ranks(1, [&](World& world) {
    const Mesh mesh = world.mesh();
    Net model = make_net();
    error = error_of([&] {
      const Sharded sharded = fully_shard(model, mesh, shard);
      Muon(sharded, muon);
    });
  });
  return error;
}

TEST(Muon, RefusesWhatItCannotDo) {
  EXPECT_THAT(refusal({}), HasSubstr("Muon finds no whole matrices; set ShardOptions::matrices"));
  EXPECT_THAT(refusal({.offload = {.fraction = 0.5}, .matrices = kMatrices}),
              HasSubstr("matrices must stay whole, but offload.fraction is 0.5"));
  EXPECT_THAT(refusal({.matrices = {.declared = true}}),
              HasSubstr("matrices is set, but the model has no trained matrix that it finds"));
  EXPECT_THAT(refusal({.matrices = {.named = {{"*.fusd"}}}}),
              HasSubstr("matrices.named has '*.fusd', but no trained matrix of the model is called "
                        "so; did you mean 'first.fused'?"));
  EXPECT_THAT(refusal({.matrices = {.named = {{"*.fused"}}, .except = {"frst.*"}}}),
              HasSubstr("matrices.except has 'frst.*'"));
  EXPECT_THAT(refusal({.matrices = {.named = {{.pattern = "*.fused", .rows = {32, 60}}}}}),
              HasSubstr("matrices of [32, 60] rows do not fill parameter 'first.fused', which has "
                        "96 rows of 32"));
  const ShardOptions good{.matrices = kMatrices};
  EXPECT_THAT(refusal(good, {.momentum = 1.0}), HasSubstr("Muon's momentum is 1; use a number"));
  EXPECT_THAT(refusal(good, {.iterations = 0}), HasSubstr("Muon's iterations is 0; use 1 to 99"));
  EXPECT_THAT(refusal(good, {.c = 0.5}), HasSubstr("Muon's c is 0.5; use 0, or a number that is"));
  EXPECT_THAT(refusal(good, {.products_dtype = at::kHalf}),
              HasSubstr("Muon's products_dtype is Half; use Float, BFloat16 or nullopt"));
}

}  // namespace
}  // namespace fsdp::muon_test
