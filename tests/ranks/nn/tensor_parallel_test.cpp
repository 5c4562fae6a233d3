// Language models that the ranks of a tp group compute together: the same losses, weights and
// logits as of the whole model.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>

#include "fsdp/base/error.h"
#include "fsdp/base/text.h"
#include "fsdp/comm/communicator.h"
#include "support/sharded_training.h"
#include "support/tensor_parallel_models.h"

namespace fsdp::nn::tensor_parallel_test {
namespace {

using namespace tensor_parallel;
using ::testing::AllOf;
using ::testing::HasSubstr;
using testing::run_ranks;

// --- training ------------------------------------------------------------------------------------

struct Trained {
  std::vector<std::vector<double>> losses;  // by step and loss
  std::vector<at::Tensor> weights;
};

Trained train_whole(const ModelConfig& config, int num_losses) {
  Trained trained;
  trained.losses.resize(kSteps);
  trained.weights = testing::train_plain(
      build(config), num_losses, kSteps, [&](const auto& model, int loss, int step) {
        const at::Tensor value = loss_of(model, loss, step);
        trained.losses[static_cast<size_t>(step)].push_back(value.item<double>());
        return value;
      });
  return trained;
}

// Bitwise: they decide together.
void expect_same_on_ranks(const at::Tensor& value, const MeshAxis& tp, const std::string& what) {
  const at::Tensor all = at::empty({tp.size()}, value.options());
  tp.gather().all_gather(all, value.detach().view({1}), "losses").wait();
  EXPECT_TRUE(at::equal(all, value.detach().expand_as(all))) << what << "\n" << all;
}

struct How {
  ShardOptions options = {};
  Recompute recompute = Recompute::kNone;
};

void train_like_the_whole(const SmallModel& each, const Grids& grids, const Trained& expected,
                          const How& how) {
  const std::string what =
      concat(each.name, ", ", text(grids), ", ", to_text(how.options.strategy));
  run_ranks(grids.ranks, [&](World& world) {
    const Mesh mesh = world.mesh(grids.mesh);
    const auto model = build(each.config, how.recompute);
    const Sharded sharded = fully_shard(model, mesh, how.options);
    testing::train(model, sharded, mesh.loss(), kSteps,
                   [&](const auto& sharded_model, int loss, int step) {
                     const at::Tensor value = loss_of(sharded_model, loss, step);
                     const double wanted =
                         expected.losses[static_cast<size_t>(step)][static_cast<size_t>(loss)];
                     EXPECT_NEAR(value.template item<double>(), wanted, 1e-5 * wanted) << what;
                     expect_same_on_ranks(value, *mesh.tp(), what);
                     return value;
                   });
    testing::expect_close(testing::weights_of(sharded, model),
                          owned_of(expected.weights, mesh, *model), what);
  });
}

// The strategies in turn.
void train_on_all_grids(const SmallModel& each, int most_ep) {
  const std::span<const Strategy> strategies = named_strategies();
  size_t number = 0;
  for (const int ranks : {2, 4, 8}) {
    std::map<int, Trained> expected;  // by number of losses
    for (const Grids& grids : grids_of(ranks, most_ep)) {
      const int num_losses = grids.num_losses();
      if (!expected.contains(num_losses))
        expected[num_losses] = train_whole(each.config, num_losses);
      train_like_the_whole(each, grids, expected.at(num_losses),
                           {{.strategy = strategies[number++ % strategies.size()]}});
    }
  }
}

TEST(TensorParallelLlama, LearnsWhatTheWholeModelLearns) {
  for (const SmallModel& each : dense_models()) train_on_all_grids(each, /*most_ep=*/1);
}

TEST(TensorParallelMixtral, LearnsWhatTheWholeModelLearns) {
  train_on_all_grids({"mixtral", mixtral()}, /*most_ep=*/8);
}

TEST(TensorParallelPrediction, LearnsWhatTheWholeModelLearns) {
  for (const SmallModel& each : predicting_models()) train_on_all_grids(each, /*most_ep=*/1);
  train_on_all_grids({"predicting_mixtral", predicting_mixtral()}, /*most_ep=*/4);
}

TEST(TensorParallelHybrid, LearnsWhatTheWholeModelLearns) {
  for (const SmallModel& each : hybrid_models()) train_on_all_grids(each, /*most_ep=*/1);
  train_on_all_grids({"hybrid_experts", expert_hybrid()}, /*most_ep=*/4);
}

TEST(TensorParallelDeepseek, LearnsWhatTheWholeModelLearns) {
  train_on_all_grids({"deepseek", deepseek()}, /*most_ep=*/4);
  DeepseekV3Config direct = deepseek();
  direct.q_lora_rank = 0;
  direct.decoder.attention_bias = direct.decoder.tie_word_embeddings = true;
  direct.decoder.vocab_size = 37;
  train_on_all_grids({"deepseek_direct", direct}, /*most_ep=*/1);
}

void train_recomputed_with_every_strategy(const SmallModel& model,
                                          std::initializer_list<Grids> all_grids) {
  for (const Grids& grids : all_grids) {
    const Trained expected = train_whole(model.config, grids.num_losses());
    for (const Strategy& strategy : named_strategies())
      for (const Recompute recompute : {Recompute::kNone, Recompute::kBlock})
        train_like_the_whole(model, grids, expected, {{.strategy = strategy}, recompute});
  }
}

TEST(TensorParallelMixtral, LearnsTheSameWithEveryStrategyAndRecomputed) {
  train_recomputed_with_every_strategy(
      {"mixtral", mixtral()},
      {{4, {.ep = 4, .tp = 2}}, {4, {.outer = 2, .tp = 2}}, {4, {.tp = 4}}});
}

TEST(TensorParallelPrediction, LearnsTheSameWithEveryStrategyAndRecomputed) {
  train_recomputed_with_every_strategy({"predicting_mixtral", predicting_mixtral()},
                                       {{4, {.outer = 2, .ep = 4, .tp = 2}}});
}

TEST(TensorParallelHybrid, LearnsTheSameWithEveryStrategyAndRecomputed) {
  train_recomputed_with_every_strategy(hybrid_models()[2], {{4, {.outer = 2, .tp = 2}}});
}

TEST(TensorParallelDeepseek, LearnsTheSameWithEveryStrategyAndRecomputed) {
  train_recomputed_with_every_strategy({"deepseek", deepseek()},
                                       {{4, {.outer = 2, .ep = 4, .tp = 2}}});
}

TEST(TensorParallelLlama, LearnsTheSameInEveryPool) {
  const SmallModel model{"tied", dense_models()[2].config};
  const Grids grids{4, {.tp = 2}};
  const Trained expected = train_whole(model.config, grids.num_losses());
  for (const PoolKind pool : all_pool_kinds())
    train_like_the_whole(model, grids, expected, {{.pool = pool}, Recompute::kBlock});
}

// Weights that are not trained: their layers have no gradients to compute, and pass on those of
// their inputs.
TEST(TensorParallelModel, LearnsTheSameWithFrozenWeights) {
  const auto frozen = [](const ModelConfig& config, const char* part) {
    const auto model = build(config);
    for (const auto& item : model->named_parameters())
      if (item.key().find(part) != std::string::npos) item.value().set_requires_grad(false);
    return model;
  };
  const auto learns_the_same = [&](const SmallModel& each, const char* part) {
    const std::vector<at::Tensor> expected =
        testing::train_plain(frozen(each.config, part), 2, kSteps, loss_of);
    run_ranks(4, [&](World& world) {
      const Mesh mesh = world.mesh({.tp = 2});
      const auto model = frozen(each.config, part);
      const Sharded sharded = fully_shard(model, mesh);
      testing::train(model, sharded, mesh.loss(), kSteps, loss_of);
      testing::expect_close(testing::weights_of(sharded, model), owned_of(expected, mesh, *model),
                            concat(each.name, ", frozen ", part));
    });
  };
  for (const char* part : {"q_proj", "_proj", "embed_tokens", "lm_head", "norm"})
    learns_the_same(dense_models()[1], part);
  for (const char* part : {"in_proj", "conv1d", "A_log", "mixer"})
    learns_the_same(hybrid_models()[1], part);
}

// Weights, activations and what travels of them in bf16; sums over ranks are wide.
TEST(TensorParallelModel, TrainsInBf16) {
  for (const SmallModel& each : {SmallModel{"mixtral", predicting_mixtral()}, hybrid_models()[1]}) {
    std::vector<double> expected;
    std::vector<double> losses;
    for (const auto& [ranks, into] : {std::pair{1, &expected}, std::pair{4, &losses}})
      run_ranks(ranks, [&, ranks = ranks, into = into](World& world) {
        const Mesh mesh = world.mesh({.tp = ranks});
        const auto model = build_language_model(each.config, {.seed = 3, .dtype = at::kBFloat16});
        model->to(testing::test_device());
        const Sharded sharded =
            fully_shard(model, mesh, {.precision = {.main_storage = MainStorage::kSeparate}});
        testing::train(model, sharded, 0, kSteps, [&](const auto& trained, int loss, int step) {
          const at::Tensor value = loss_of(trained, loss, step);
          EXPECT_EQ(value.scalar_type(), at::kFloat);
          if (world.rank() == 0) into->push_back(value.template item<double>());
          return value;
        });
      });
    ASSERT_EQ(losses.size(), static_cast<size_t>(kSteps));
    // A rounding of bf16 (4e-3 of an activation) moves a loss near log(40) by a tenth of what the
    // steps do.
    for (size_t i = 0; i < expected.size(); ++i)
      EXPECT_NEAR(losses[i], expected[i], 0.01) << each.name;
  }
}

// --- logits --------------------------------------------------------------------------------------

TEST(TensorParallelModel, HasAllLogitsOnEveryRank) {
  std::vector<SmallModel> models = dense_models();
  for (SmallModel& each : hybrid_models()) models.push_back(std::move(each));
  models.push_back({"deepseek", deepseek()});
  for (const SmallModel& each : models) {
    const at::Tensor tokens = batch_of(0, 0).tokens;
    const auto loss_of_logits = [&](const auto& model, int loss, int step) {
      return model->logits(batch_of(loss, step).tokens).square().mean();
    };
    const at::Tensor expected = build(each.config)->logits(tokens).detach();
    const std::vector<at::Tensor> weights =
        testing::train_plain(build(each.config), 2, kSteps, loss_of_logits);
    run_ranks(4, [&](World& world) {
      const Mesh mesh = world.mesh({.tp = 2});
      const auto model = build(each.config);
      const Sharded sharded = fully_shard(model, mesh);
      {
        const at::NoGradGuard no_grad;
        EXPECT_TRUE(at::allclose(model->logits(tokens), expected, 1e-5, 1e-5)) << each.name;
      }
      // A loss that a user computes of them, the same on the ranks of a tp group.
      testing::train(model, sharded, mesh.loss(), kSteps, loss_of_logits);
      testing::expect_close(testing::weights_of(sharded, model), owned_of(weights, mesh, *model),
                            each.name);
    });
  }
}

// --- errors --------------------------------------------------------------------------------------

std::string error_of_sharding(const ModelConfig& config, int tp) {
  std::string message;
  run_ranks(tp, [&](World& world) {
    const Mesh mesh = world.mesh({.tp = tp});
    const std::string mine =
        testing::error_of<UsageError>([&] { fully_shard(build(config), mesh); });
    if (world.rank() == 0) message = mine;
  });
  return message;
}

TEST(TensorParallelLlama, RefusesWhatTheRanksCannotShare) {
  LlamaConfig few_keys = llama();
  few_keys.num_key_value_heads = 2;
  EXPECT_THAT(error_of_sharding(few_keys, 4),
              AllOf(HasSubstr("num_key_value_heads is 2"), HasSubstr("tp = 4")));
  LlamaConfig few_heads = llama();
  few_heads.num_attention_heads = few_heads.num_key_value_heads = 2;
  EXPECT_THAT(error_of_sharding(few_heads, 4),
              AllOf(HasSubstr("num_attention_heads is 2"), HasSubstr("tp = 4")));
  LlamaConfig odd = llama();
  odd.intermediate_size = 29;
  EXPECT_THAT(error_of_sharding(odd, 2),
              AllOf(HasSubstr("mlp.gate_proj.weight"), HasSubstr("29"), HasSubstr("tp 2")));
  NemotronHConfig few_groups = hybrid();
  few_groups.n_groups = 2;
  few_groups.ssm_state_size = 4;  // tensors can be cut, but not between groups
  EXPECT_THAT(error_of_sharding(few_groups, 4),
              AllOf(HasSubstr("n_groups is 2"), HasSubstr("tp = 4")));
  NemotronHConfig odd_hybrid = hybrid();
  odd_hybrid.intermediate_size = 29;
  EXPECT_THAT(error_of_sharding(odd_hybrid, 2),
              AllOf(HasSubstr("mixer.up_proj.weight"), HasSubstr("29"), HasSubstr("tp 2")));
}

TEST(TensorParallelModel, RefusesSequencesThatTheRanksCannotShareAndDecoding) {
  for (const SmallModel& each : {dense_models()[0], dense_models()[4], hybrid_models()[0]})
    run_ranks(2, [&](World& world) {
      const Mesh mesh = world.mesh({.tp = 2});
      const auto model = build(each.config);
      const Sharded sharded = fully_shard(model, mesh);
      const at::Tensor tokens = batch_of(0, 0).tokens.narrow(1, 0, 7);
      EXPECT_THAT(testing::error_of<UsageError>([&] { model->loss(tokens, tokens); }),
                  AllOf(HasSubstr("a sequence has 7 tokens"), HasSubstr("tp 2")));
      DecodingCache cache;
      EXPECT_THAT(testing::error_of<UsageError>([&] { model->next_logits(tokens, cache); }),
                  HasSubstr("tp = 2"));
    });
}

}  // namespace
}  // namespace fsdp::nn::tensor_parallel_test
