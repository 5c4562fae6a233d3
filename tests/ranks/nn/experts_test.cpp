// Experts against a dense loop over all of them, whole and shared out among the ranks of ep groups.
#include "fsdp/nn/layers/experts.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <map>

#include "fsdp/base/text.h"
#include "fsdp/nn/layers/expert_loads.h"
#include "support/layer_gradients.h"
#include "support/sharded_training.h"
#include "support/small_models.h"

namespace fsdp::nn::experts_test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using testing::run_ranks;
using testing::waves;

constexpr int64_t kHidden = 6;

ExpertsOptions small_options(int64_t num_experts, int64_t num_chosen) {
  return {.router = {.hidden_size = kHidden, .num_experts = num_experts, .num_chosen = num_chosen},
          .intermediate_size = 7};
}

void fill(torch::nn::Module& module) {
  const at::NoGradGuard no_grad;
  double phase = 0.0;
  for (at::Tensor& parameter : module.parameters())
    parameter.copy_(waves(parameter.sizes(), phase += 1.3, 0.4));
}

Experts small_experts(const ExpertsOptions& options) {
  Experts experts(options);
  fill(*experts);
  return experts;
}

// The weight of every expert for every token, 0 for those that were not chosen: choice after
// choice, as a person would choose.
at::Tensor shares_by_hand(const at::Tensor& logits, const RouterOptions& o) {
  const bool is_softmax = o.score == RouterScore::kSoftmax;
  const at::Tensor scores = is_softmax ? at::softmax(logits, -1) : at::sigmoid(logits);
  const int64_t group_size = o.num_experts / o.num_groups;
  at::Tensor chosen = at::zeros_like(scores);
  for (int64_t t = 0; t < scores.size(0); ++t) {
    std::vector<std::pair<double, int64_t>> groups;
    for (int64_t g = 0; g < o.num_groups; ++g) {
      const at::Tensor sorted =
          std::get<0>(scores[t].narrow(0, g * group_size, group_size).sort(0, true));
      groups.emplace_back(
          sorted.narrow(0, 0, std::min<int64_t>(2, group_size)).sum().item<double>(), g);
    }
    std::sort(groups.rbegin(), groups.rend());
    std::vector<std::pair<double, int64_t>> experts;
    for (int64_t g = 0; g < o.num_open_groups; ++g)
      for (int64_t i = 0; i < group_size; ++i) {
        const int64_t expert = groups[static_cast<size_t>(g)].second * group_size + i;
        experts.emplace_back(scores[t][expert].item<double>(), expert);
      }
    std::sort(experts.rbegin(), experts.rend());
    for (int64_t i = 0; i < o.num_chosen; ++i)
      chosen[t][experts[static_cast<size_t>(i)].second] = 1;
  }
  at::Tensor shares = scores * chosen;
  if (o.normalizes) shares = shares / shares.sum(-1, true);
  return shares * o.scale;
}

// Every expert computes every token; results of experts that were not chosen count as 0.
at::Tensor dense_experts(Experts& experts, const at::Tensor& x, const ExpertsOptions& o) {
  std::map<std::string, at::Tensor> weights;
  for (const auto& item : experts->named_parameters()) weights[item.key()] = item.value();
  const auto mlp = [&](const at::Tensor& gate, const at::Tensor& up, const at::Tensor& down) {
    return at::linear(at::silu(at::linear(x, gate)) * at::linear(x, up), down);
  };
  const at::Tensor logits = at::linear(x.flatten(0, 1), weights.at("gate.weight"));
  const at::Tensor shares =
      shares_by_hand(logits, o.router).view({x.size(0), x.size(1), o.router.num_experts});
  at::Tensor sum = weights.contains("shared_expert.gate_proj.weight")
                       ? mlp(weights.at("shared_expert.gate_proj.weight"),
                             weights.at("shared_expert.up_proj.weight"),
                             weights.at("shared_expert.down_proj.weight"))
                       : at::zeros_like(x);
  const at::Tensor gate_up = weights.at("experts.gate_up_proj")
                                 .view({o.router.num_experts, 2, o.intermediate_size, kHidden});
  const at::Tensor down =
      weights.at("experts.down_proj").view({o.router.num_experts, kHidden, o.intermediate_size});
  for (int64_t i = 0; i < o.router.num_experts; ++i)
    sum = sum + shares.narrow(-1, i, 1) * mlp(gate_up[i][0], gate_up[i][1], down[i]);
  return sum;
}

TEST(Experts, EqualADenseLoop) {
  std::vector<ExpertsOptions> all;
  for (const int64_t num_chosen : {1, 2, 3, 8}) all.push_back(small_options(8, num_chosen));
  all[1].shared_size = 5;
  all.push_back(small_options(8, 3));  // DeepSeek-V3's router
  all.back().router.score = RouterScore::kSigmoid;
  all.back().router.num_groups = 4;
  all.back().router.num_open_groups = 2;
  all.back().router.scale = 2.5;
  all.push_back(small_options(8, 2));  // Qwen's, without norm_topk_prob
  all.back().router.normalizes = false;
  for (size_t c = 0; c < all.size(); ++c) {
    Experts experts = small_experts(all[c]);
    const at::Tensor x = waves({3, 8, kHidden}, 0.5).set_requires_grad(true);
    const auto gradients_of = [&](const at::Tensor& y) {
      (y * waves(y.sizes(), 0.9)).sum().backward();
      std::vector<at::Tensor> results = {y.detach(), x.grad()};
      x.mutable_grad() = at::Tensor();
      for (at::Tensor& parameter : experts->parameters()) {
        results.push_back(parameter.grad());
        parameter.mutable_grad() = at::Tensor();
      }
      return results;
    };
    const auto actual = gradients_of(experts(x).output);
    const auto expected = gradients_of(dense_experts(experts, x, all[c]));
    for (size_t i = 0; i < actual.size(); ++i)
      EXPECT_TRUE(at::allclose(actual[i], expected[i], 1e-5, 1e-6)) << "case " << c << ", " << i;
  }
}

// Nemotron's: without gates, between two projections, beside a shared one.
TEST(Experts, EqualADenseLoopWithoutGates) {
  ExpertsOptions o = small_options(8, 3);
  o.kind = MlpKind::kSquaredRelu;
  o.latent_size = 4;
  o.shared_size = 5;
  o.shared_module = "shared_experts";
  o.bias = true;
  Experts experts = small_experts(o);
  std::map<std::string, at::Tensor> weights;
  for (const auto& item : experts->named_parameters()) weights[item.key()] = item.value();
  const auto mlp = [](const at::Tensor& x, const at::Tensor& up, const at::Tensor& up_bias,
                      const at::Tensor& down, const at::Tensor& down_bias) {
    return at::linear(at::relu(at::linear(x, up, up_bias)).square(), down, down_bias);
  };
  const at::Tensor x = waves({2, 9, kHidden}, 0.5);
  const at::Tensor tokens = x.flatten(0, 1);
  const at::Tensor shares = shares_by_hand(at::linear(tokens, weights.at("gate.weight")), o.router);
  const at::Tensor latent =
      at::linear(tokens, weights.at("fc1_latent_proj.weight"), weights.at("fc1_latent_proj.bias"));
  const at::Tensor up = weights.at("experts.up_proj").view({8, o.intermediate_size, 4});
  const at::Tensor down = weights.at("experts.down_proj").view({8, 4, o.intermediate_size});
  at::Tensor sum = at::zeros_like(latent);
  for (int64_t i = 0; i < 8; ++i)
    sum = sum + shares.narrow(-1, i, 1) * mlp(latent, up[i], {}, down[i], {});
  const at::Tensor expected =
      at::linear(sum, weights.at("fc2_latent_proj.weight"), weights.at("fc2_latent_proj.bias")) +
      mlp(tokens, weights.at("shared_experts.up_proj.weight"),
          weights.at("shared_experts.up_proj.bias"), weights.at("shared_experts.down_proj.weight"),
          weights.at("shared_experts.down_proj.bias"));
  EXPECT_TRUE(at::allclose(experts(x).output.flatten(0, 1), expected, 1e-5, 1e-6));
}

// --- biases --------------------------------------------------------------------------------------

RouterOptions biased_options() {
  return {.hidden_size = kHidden,
          .num_experts = 4,
          .num_chosen = 1,
          .score = RouterScore::kSigmoid,
          .has_bias = true,
          .bias_rate = 0.125};
}

Router biased_router() {
  Router router(biased_options());
  fill(*router);
  return router;
}

// Choices follow scores and biases; weights are of scores alone.
TEST(RouterBias, ChangesChoicesAndNotWeights) {
  RouterOptions options = biased_options();
  options.normalizes = false;
  Router router(options);
  fill(*router);
  const at::Tensor tokens = waves({12, kHidden}, 0.5);
  {
    const at::NoGradGuard no_grad;
    router->named_buffers()["e_score_correction_bias"][2] = 10.0;
  }
  const RoutedChoices routed = router(tokens);
  EXPECT_TRUE(routed.choices.chosen.eq(2).all().item<bool>());
  const at::Tensor scores =
      at::sigmoid(at::linear(tokens, router->named_parameters()["weight"])).narrow(1, 2, 1);
  EXPECT_TRUE(at::allclose(routed.weight, scores));
}

// One step up or down, and none for the mean; counted are forwards that are trained.
TEST(RouterBias, MovesByOneStepTowardsTheMean) {
  Router router = biased_router();
  const at::Tensor tokens = waves({12, kHidden}, 0.5);
  {
    const at::NoGradGuard no_grad;
    router(tokens);  // nobody trains it
  }
  EXPECT_FALSE(router->num_chosen().defined());
  router(tokens.narrow(0, 0, 5));
  router(tokens.narrow(0, 5, 7));
  EXPECT_EQ(router->num_chosen().sum().item<double>(), 12.0);
  router->update_bias(at::tensor({6.0, 3.0, 0.0, 3.0}, at::kDouble));
  EXPECT_TRUE(at::equal(router->named_buffers()["e_score_correction_bias"],
                        at::tensor({-0.125f, 0.0f, 0.125f, 0.0f})));
  EXPECT_EQ(router->num_chosen().sum().item<double>(), 0.0);
}

// Ranks of a tp group fill up the batch of a prediction layer.
TEST(RouterBias, CountsNoPlacesThatAreNotTokens) {
  Router router = biased_router();
  const at::Tensor tokens = waves({12, kHidden}, 0.5);
  router(tokens.narrow(0, 0, 9));
  const at::Tensor expected = router->num_chosen().clone();
  Router filled = biased_router();
  at::Tensor weight = at::full({12}, 12.0 / 9.0);
  weight.narrow(0, 9, 3).zero_();
  filled(tokens, weight);
  EXPECT_TRUE(at::equal(filled->num_chosen(), expected)) << filled->num_chosen();
}

// All tokens want the same expert until the biases have spread them.
TEST(RouterBias, EvensOutTheLoad) {
  run_ranks(1, [](World& world) {
    const Mesh mesh = world.mesh();
    RouterOptions options = biased_options();
    options.bias_rate = 0.003;
    Router router(options);
    fill(*router);
    {
      const at::NoGradGuard no_grad;
      router->named_parameters()["weight"][1].fill_(1.0);
    }
    const at::Tensor tokens = waves({256, kHidden}, 0.5).abs();
    EXPECT_EQ(router(tokens).load.share[1].item<double>(), 1.0);
    at::Tensor sum = at::zeros({4});
    for (int step = 0; step < 700; ++step) {
      const RouterLoad load = router(tokens).load;
      if (step >= 600) sum += load.share / 100;
      even_out_loads(*router.ptr(), mesh);
    }
    // Biases go on by steps of one size, and 256 tokens of equal scores change sides together.
    EXPECT_LT((sum - 0.25).abs().max().item<double>(), 0.1) << sum;
  });
}

TEST(Experts, WithoutTokensGetGradientsOfZero) {
  Experts experts = small_experts(small_options(4, 1));
  {
    const at::NoGradGuard no_grad;  // the router prefers expert 2, for tokens with positive sums
    at::Tensor gate = experts->named_parameters()["gate.weight"];
    gate.zero_();
    gate[2].fill_(1.0);
  }
  const RoutedTokens routed = experts(waves({1, 5, kHidden}, 0.5).abs());
  EXPECT_TRUE(at::equal(routed.load.share, at::tensor({0.0f, 0.0f, 1.0f, 0.0f})));
  routed.output.sum().backward();
  for (const auto& item : experts->named_parameters()) {
    if (!item.key().starts_with("experts.")) continue;
    const std::vector<at::Tensor> parts = item.value().grad().chunk(4);
    for (size_t i = 0; i < 4; ++i)
      EXPECT_EQ(parts[i].abs().sum().item<double>() > 0, i == 2) << item.key() << " of " << i;
  }
}

// The package's formula, on the choices and probabilities of all layers and tokens at once.
TEST(LoadBalance, IsThePackagesFormula) {
  std::vector<RouterLoad> loads;
  std::vector<at::Tensor> scores;
  for (int layer = 0; layer < 3; ++layer) {
    Experts experts = small_experts(small_options(4, 2));
    const at::Tensor x = waves({2, 9, kHidden}, 0.5 + layer);
    scores.push_back(at::linear(x.flatten(0, 1), experts->named_parameters()["gate.weight"]));
    loads.push_back(experts(x).load);
  }
  const at::Tensor probability = at::softmax(at::cat(scores), -1);
  const at::Tensor chosen = at::one_hot(std::get<1>(probability.topk(2, -1)), 4);
  const at::Tensor expected =
      (chosen.to(at::kFloat).mean(0) * probability.mean(0).unsqueeze(0)).sum() * 4;
  EXPECT_NEAR(load_balancing_loss(loads).item<double>(), expected.item<double>(), 1e-5);
}

// --- shared out ----------------------------------------------------------------------------------

struct LayerImpl : torch::nn::Module {
  explicit LayerImpl(const ExpertsOptions& options)
      : experts(register_module("experts", Experts(options))) {}
  at::Tensor forward(const at::Tensor& x) { return x + experts(x).output; }
  Experts experts;
};

struct NetImpl : torch::nn::Module {
  explicit NetImpl(const ExpertsOptions& options)
      : layer(register_module("layer", Unit<LayerImpl>(options))) {
    fill(*this);
  }
  Unit<LayerImpl> layer;
};

// By rank, so that they have other numbers of tokens, too; some have none.
at::Tensor tokens_of(int rank) { return waves({rank % 3, 4, kHidden}, 0.5 + rank); }

void prefer_first_experts(torch::nn::Module& net, int64_t num_chosen) {
  const at::NoGradGuard no_grad;
  at::Tensor gate = net.named_parameters()["layer.experts.gate.weight"];
  for (int64_t i = 0; i < num_chosen; ++i) gate[i].fill_(5.0);  // tokens have positive sums
}

// The output and the gradient of x, with every number of ranks that share out the experts.
TEST(SharedOutExperts, ComputeWhatAllExpertsWould) {
  for (const int ranks : {2, 4, 8})
    for (int ep = 2; ep <= ranks; ep *= 2)
      for (const int64_t num_chosen : {1, 2, 5})
        for (const bool skewed : {false, true})
          run_ranks(ranks, [&](World& world) {
            const ExpertsOptions options = small_options(8, num_chosen);
            const auto plain = std::make_shared<NetImpl>(options);
            const auto net = std::make_shared<NetImpl>(options);
            const Mesh mesh = world.mesh({.ep = ep});
            const auto input = [&] {
              const at::Tensor x = tokens_of(world.rank());
              return (skewed ? x.abs() : x).clone().set_requires_grad(true);
            };
            if (skewed) {  // most ranks have no tokens for their experts
              prefer_first_experts(*plain, num_chosen);
              prefer_first_experts(*net, num_chosen);
            }
            const Sharded sharded = fully_shard(net, mesh);
            const at::Tensor expected_x = input();
            const at::Tensor expected = plain->layer(expected_x);
            expected.square().sum().backward();
            const at::Tensor x = input();
            const at::Tensor y = net->layer(x);
            y.square().sum().backward();
            const std::string which =
                concat(ranks, " ranks, ep ", ep, ", ", num_chosen, skewed ? " skewed" : "");
            // Products of other numbers of rows may be summed in another order.
            EXPECT_TRUE(at::allclose(y, expected, 1e-5, 1e-6)) << which;
            EXPECT_TRUE(at::allclose(x.grad(), expected_x.grad(), 1e-5, 1e-6)) << which;
          });
}

TEST(SharedOutExperts, MustDivideEvenly) {
  run_ranks(4, [](World& world) {
    const Mesh mesh = world.mesh({.ep = 4});
    const auto net = std::make_shared<NetImpl>(small_options(6, 2));
    EXPECT_THAT(testing::error_of([&] { fully_shard(net, mesh); }),
                AllOf(HasSubstr("6 experts"), HasSubstr("ep = 4"), HasSubstr("must divide")));
  });
}

// --- whole models --------------------------------------------------------------------------------

MixtralConfig shared_out_mixtral() {
  MixtralConfig config = testing::small_mixtral();
  config.num_local_experts = 8;
  config.shared_expert_intermediate_size = 11;
  config.decoder.num_nextn_predict_layers = 1;
  return config;
}

std::shared_ptr<LanguageModel> mixtral(Recompute recompute = Recompute::kNone) {
  const auto model =
      build_language_model(shared_out_mixtral(), {.seed = 3, .recompute = recompute});
  testing::disturb(*model);
  return model;
}

at::Tensor loss_of(const std::shared_ptr<LanguageModel>& model, int rank, int step) {
  return testing::small_loss(*model, testing::small_tokens(rank, step)).total;
}

// The slices of experts that this rank owns, and all other tensors whole.
std::vector<at::Tensor> owned_of(const std::vector<at::Tensor>& whole, const Mesh& mesh,
                                 const torch::nn::Module& model) {
  std::vector<at::Tensor> owned;
  const std::vector<at::Tensor> parameters = model.parameters();
  for (size_t i = 0; i < whole.size(); ++i) {
    const int64_t rows = parameters[i].size(0);
    const bool is_cut = rows != whole[i].size(0);
    owned.push_back(is_cut ? whole[i].narrow(0, mesh.ep()->rank() * rows, rows) : whole[i]);
  }
  return owned;
}

// On eight ranks the one that shards most: the others differ in nothing that four do not show.
std::vector<Strategy> strategies_for(int ranks) {
  if (ranks == 8) return {Strategy::optim_grads_params};
  return {named_strategies().begin(), named_strategies().end()};
}

TEST(SharedOutExperts, LearnWhatTheWholeModelLearns) {
  for (const int ranks : {2, 4, 8}) {
    const auto expected = testing::train_plain(mixtral(), ranks, 3, loss_of);
    for (int outer = 1; outer <= ranks; outer *= 2)
      for (int ep = 2; ep <= ranks; ep *= 2)
        for (const Strategy& strategy : strategies_for(ranks))
          run_ranks(ranks, [&](World& world) {
            const Mesh mesh = world.mesh({.outer = outer, .ep = ep});
            const auto model = mixtral();
            const Sharded sharded = fully_shard(model, mesh, {.strategy = strategy});
            testing::train(model, sharded, world.rank(), 3, loss_of);
            testing::expect_close(
                testing::weights_of(sharded, model), owned_of(expected, mesh, *model),
                concat(ranks, " ranks, outer ", outer, ", ep ", ep, ", ", to_text(strategy)));
          });
  }
}

// Options that change how weights and gradients live, two at a time.
TEST(SharedOutExperts, LearnTheSameWithOtherOptions) {
  constexpr int kRanks = 4;
  const auto expected = testing::train_plain(mixtral(), kRanks, 3, loss_of);
  for (const Recompute recompute : {Recompute::kNone, Recompute::kBlock})
    for (const PoolKind pool : all_pool_kinds())
      for (const auto& [granularity, lifetime] :
           {std::pair{Granularity::element(), GradientLifetime::kStep},
            std::pair{Granularity::row(), GradientLifetime::kPersistent},
            std::pair{Granularity::tensor(), GradientLifetime::kStep}})
        run_ranks(kRanks, [&](World& world) {
          const Mesh mesh = world.mesh({.ep = 2});
          const auto model = mixtral(recompute);
          const Sharded sharded = fully_shard(
              model, mesh,
              {.pool = pool, .gradient_lifetime = lifetime, .granularity = granularity});
          testing::train(model, sharded, world.rank(), 3, loss_of);
          testing::expect_close(
              testing::weights_of(sharded, model), owned_of(expected, mesh, *model),
              concat(name_of(pool), recompute == Recompute::kBlock ? " recomputed" : ""));
        });
}

// The biases of routers are those of the whole batch, to the bit, on every rank and grid.
TEST(SharedOutExperts, EvenOutTheirLoadsTogether) {
  constexpr int kLosses = 4;
  NemotronHConfig config = testing::small_expert_hybrid();
  config.num_attention_heads = config.num_key_value_heads = 4;
  config.intermediate_size = 30;
  const auto trained = [&](World& world, const MeshOptions& grids, Recompute recompute) {
    const Mesh mesh = world.mesh(grids);
    const auto model = build_language_model(config, {.seed = 3, .recompute = recompute});
    testing::disturb(*model);
    const Sharded sharded = fully_shard(model, mesh);
    const int microbatches = kLosses / mesh.num_losses();
    for (int step = 0; step < 4; ++step) {
      for (int i = 0; i < microbatches; ++i) {
        sharded.microbatch({.last = i + 1 == microbatches});
        const at::Tensor tokens = testing::small_tokens(mesh.loss() * microbatches + i, step, 2, 8);
        (testing::small_loss(*model, tokens).total / microbatches).backward();
      }
      for (const FlatShard& shard : sharded.flat_shards())
        shard.main_weight.sub_(shard.gradient, 0.1);
      sharded.refresh_weights();
      sharded.zero_grad();
      model->end_step(mesh);
    }
    std::vector<at::Tensor> biases;
    for (const at::Tensor& bias : model->buffers()) biases.push_back(bias.clone());
    return biases;
  };
  std::vector<at::Tensor> expected;
  run_ranks(1, [&](World& world) { expected = trained(world, {}, Recompute::kNone); });
  ASSERT_EQ(expected.size(), 3u);
  for (const at::Tensor& bias : expected) EXPECT_GT(bias.abs().max().item<double>(), 0.005);
  for (const MeshOptions& grids :
       {MeshOptions{}, {.ep = 4}, {.outer = 2, .ep = 2}, {.tp = 2}, {.ep = 2, .tp = 2}})
    for (const Recompute recompute : {Recompute::kNone, Recompute::kBlock})
      run_ranks(4, [&](World& world) {
        const std::vector<at::Tensor> biases = trained(world, grids, recompute);
        for (size_t i = 0; i < expected.size(); ++i)
          EXPECT_TRUE(at::equal(biases[i], expected[i]))
              << "router " << i << ", outer " << grids.outer << ", ep " << grids.ep << ", tp "
              << grids.tp << "\n"
              << biases[i] << "\n"
              << expected[i];
      });
}

}  // namespace
}  // namespace fsdp::nn::experts_test
