// Experts against a dense loop over all of them, whole and shared out among the ranks of ep groups.
#include "fsdp/nn/layers/experts.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <map>

#include "fsdp/base/text.h"
#include "support/layer_gradients.h"
#include "support/one_in.h"
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
  const auto weights = experts->named_parameters();
  const auto of = [&](const std::string& name) {
    const at::Tensor* found = weights.find(name);
    return found == nullptr ? at::Tensor() : *found;
  };
  const auto project = [&](const at::Tensor& input, const std::string& name) {
    return at::linear(input, of(name + ".weight"), of(name + ".bias"));
  };
  const bool is_gated = o.kind == MlpKind::kGatedSilu;
  const at::Tensor tokens = x.flatten(0, 1);
  const at::Tensor shares = shares_by_hand(at::linear(tokens, of("gate.weight")), o.router);
  const at::Tensor inputs = o.latent_size > 0 ? project(tokens, "fc1_latent_proj") : tokens;
  const int64_t num_experts = o.router.num_experts;
  const at::Tensor into = of(is_gated ? "experts.gate_up_proj" : "experts.up_proj")
                              .view({num_experts, -1, o.intermediate_size, inputs.size(1)});
  const at::Tensor down = of("experts.down_proj").view({num_experts, -1, o.intermediate_size});
  at::Tensor sum = at::zeros_like(inputs);
  for (int64_t i = 0; i < num_experts; ++i) {
    const at::Tensor first = at::linear(inputs, into[i][0]);
    const at::Tensor inner =
        is_gated ? at::silu(first) * at::linear(inputs, into[i][1]) : at::relu(first).square();
    sum = sum + shares.narrow(-1, i, 1) * at::linear(inner, down[i]);
  }
  if (o.latent_size > 0) sum = project(sum, "fc2_latent_proj");
  const std::string shared = std::string(o.shared_module) + ".";
  if (o.shared_size > 0) {
    const at::Tensor up = project(tokens, shared + "up_proj");
    sum = sum + project(is_gated ? at::silu(project(tokens, shared + "gate_proj")) * up
                                 : at::relu(up).square(),
                        shared + "down_proj");
  }
  return sum.view(x.sizes());
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
  all.push_back(small_options(8, 3));  // Nemotron's
  all.back().kind = MlpKind::kSquaredRelu;
  all.back().latent_size = 4;
  all.back().shared_size = 5;
  all.back().shared_module = "shared_experts";
  all.back().bias = true;
  for (size_t c = 0; c < all.size(); ++c)
    for (const int64_t rows : {1, 8}) {  // with three tokens most experts have none
      Experts experts = small_experts(all[c]);
      const at::Tensor x = waves({3, rows, kHidden}, 0.5).set_requires_grad(true);
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

MixtralConfig shared_out_mixtral() {
  MixtralConfig config = testing::small_mixtral();
  config.num_local_experts = 8;
  config.shared_expert_intermediate_size = 11;
  config.decoder.num_nextn_predict_layers = 1;
  return config;
}

std::shared_ptr<LanguageModel> mixtral() {
  const auto model = build_language_model(shared_out_mixtral(), {.seed = 3});
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

TEST(SharedOutExperts, LearnWhatTheWholeModelLearns) {
  testing::OneIn few(5);
  for (const int ranks : {2, 4}) {
    const auto expected = testing::train_plain(mixtral(), ranks, 3, loss_of);
    for (int outer = 1; outer <= ranks; outer *= 2)
      for (int ep = 2; ep <= ranks; ep *= 2)
        for (const Strategy& strategy : named_strategies()) {
          if (few.skips()) continue;
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
}

TEST(SharedOutExperts, MustDivideEvenly) {
  run_ranks(4, [](World& world) {
    const Mesh mesh = world.mesh({.ep = 4});
    MixtralConfig config = testing::small_mixtral();
    config.num_local_experts = 6;  // whose rows four ranks could share
    const auto model = build_language_model(config);
    EXPECT_THAT(testing::error_of([&] { fully_shard(model, mesh); }),
                AllOf(HasSubstr("6 experts"), HasSubstr("ep = 4"), HasSubstr("must divide")));
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
    const int microbatches = kLosses / mesh.data_parallel_size();
    for (int step = 0; step < 4; ++step) {
      for (int i = 0; i < microbatches; ++i) {
        sharded.microbatch({.last = i + 1 == microbatches});
        const at::Tensor tokens =
            testing::small_tokens(mesh.data_parallel_rank() * microbatches + i, step, 2, 8);
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
  for (const auto& [grids, recompute] :
       {std::pair{MeshOptions{.outer = 2, .ep = 2}, Recompute::kNone},
        {MeshOptions{.ep = 4}, Recompute::kBlock},
        {MeshOptions{.ep = 2, .tp = 2}, Recompute::kBlock}})
    run_ranks(4, [&, axes = grids, how = recompute](World& world) {
      const std::vector<at::Tensor> biases = trained(world, axes, how);
      for (size_t i = 0; i < expected.size(); ++i)
        EXPECT_TRUE(at::equal(biases[i], expected[i]))
            << "router " << i << ", outer " << axes.outer << ", ep " << axes.ep << ", tp "
            << axes.tp << "\n"
            << biases[i] << "\n"
            << expected[i];
    });
}

}  // namespace
}  // namespace fsdp::nn::experts_test
