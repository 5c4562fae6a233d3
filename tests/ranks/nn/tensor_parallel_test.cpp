// Language models that the ranks of a tp group compute together: the same losses, weights, logits
// and checkpoints as of the whole model.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <map>

#include "fsdp/base/error.h"
#include "fsdp/base/text.h"
#include "fsdp/checkpoint/checkpointer.h"
#include "fsdp/checkpoint/load.h"
#include "fsdp/comm/communicator.h"
#include "fsdp/optim/adamw.h"
#include "fsdp/train/model/trained_model.h"
#include "support/sharded_training.h"
#include "support/small_models.h"
#include "support/temp_dir.h"

namespace fsdp::nn::tensor_parallel_test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using testing::run_ranks;
using testing::SmallModel;

// --- models and batches --------------------------------------------------------------------------

constexpr int kSteps = 3;
constexpr int64_t kSequence = 8;

// Eight ranks can share everything, and one of them still has two query heads for a key head.
LlamaConfig llama() {
  LlamaConfig config = testing::small_llama();
  config.vocab_size = 40;
  config.num_attention_heads = 16;
  config.num_key_value_heads = 8;
  config.head_dim = 2;
  config.intermediate_size = 32;
  return config;
}

MixtralConfig mixtral() {
  return {.decoder = llama(),
          .num_local_experts = 8,
          .num_experts_per_tok = 2,
          .router_aux_loss_coef = 0.02,
          .shared_expert_intermediate_size = 11};
}

std::vector<SmallModel> dense_models() {
  LlamaConfig biased = llama();
  biased.attention_bias = biased.mlp_bias = true;
  LlamaConfig tied = llama();
  tied.tie_word_embeddings = true;
  LlamaConfig normed = llama();
  normed.qk_norm = true;
  LlamaConfig uneven = llama();
  uneven.vocab_size = 37;
  LlamaConfig tied_uneven = uneven;
  tied_uneven.tie_word_embeddings = true;
  return {{"llama", llama()},  {"biased", biased}, {"tied", tied},
          {"qk_norm", normed}, {"uneven", uneven}, {"tied_uneven", tied_uneven}};
}

std::shared_ptr<LanguageModel> build(const ModelConfig& config,
                                     Recompute recompute = Recompute::kNone) {
  const auto model = build_language_model(config, {.seed = 3, .recompute = recompute});
  testing::disturb(*model);
  return model;
}

struct Batch {
  at::Tensor tokens;
  at::Tensor targets;
};

// Some targets are none, more of them in the part of the first ranks.
Batch batch_of(int loss, int step) {
  const at::Tensor all = testing::small_tokens(loss, step, 2, kSequence);
  Batch batch{all.narrow(1, 0, kSequence), all.narrow(1, 1, kSequence).clone()};
  batch.targets[0].narrow(0, 0, 2 + loss % 3).fill_(-100);
  batch.targets[1][5] = -100;
  return batch;
}

at::Tensor loss_of(const std::shared_ptr<LanguageModel>& model, int loss, int step) {
  const Batch batch = batch_of(loss, step);
  return model->loss(batch.tokens, batch.targets).total;
}

// --- grids ---------------------------------------------------------------------------------------

struct Grids {
  int ranks;
  MeshOptions mesh;
  int num_losses() const { return ranks / mesh.tp; }
};

std::string text(const Grids& grids) {
  return concat(grids.ranks, " ranks, outer ", grids.mesh.outer, ", ep ", grids.mesh.ep, ", tp ",
                grids.mesh.tp);
}

// All factorisations with a tp axis, and an ep axis of up to `most_ep` ranks.
std::vector<Grids> grids_of(int ranks, int most_ep) {
  std::vector<Grids> all;
  for (int outer = 1; outer <= ranks; outer *= 2)
    for (int tp = 2; outer * tp <= ranks; tp *= 2)
      for (int ep = 1; ep <= std::min(ranks, most_ep); ep *= 2)
        all.push_back({ranks, {.outer = outer, .ep = ep, .tp = tp}});
  return all;
}

// What this rank has of all parameters: slices of experts and of tensors, by their sizes.
std::vector<at::Tensor> owned_of(const std::vector<at::Tensor>& whole, const Mesh& mesh,
                                 const torch::nn::Module& model) {
  std::vector<at::Tensor> owned;
  size_t number = 0;
  for (const auto& item : model.named_parameters()) {
    at::Tensor tensor = whole[number++];
    const bool is_expert = item.key().find(".experts.") != std::string::npos;
    const MeshAxis* axis = is_expert ? mesh.ep() : mesh.tp();
    for (int64_t dim = 0; dim < tensor.dim(); ++dim) {
      const int64_t size = item.value().size(dim);
      if (size != tensor.size(dim)) tensor = tensor.narrow(dim, axis->rank() * size, size);
    }
    owned.push_back(tensor);
  }
  return owned;
}

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

TEST(TensorParallelMixtral, LearnsTheSameWithEveryStrategyAndRecomputed) {
  const SmallModel model{"mixtral", mixtral()};
  for (const Grids& grids :
       {Grids{4, {.ep = 4, .tp = 2}}, Grids{4, {.outer = 2, .tp = 2}}, Grids{4, {.tp = 4}}}) {
    const Trained expected = train_whole(model.config, grids.num_losses());
    for (const Strategy& strategy : named_strategies())
      for (const Recompute recompute : {Recompute::kNone, Recompute::kBlock})
        train_like_the_whole(model, grids, expected, {{.strategy = strategy}, recompute});
  }
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
TEST(TensorParallelLlama, LearnsTheSameWithFrozenWeights) {
  const auto frozen = [](const char* part) {
    const auto model = build(dense_models()[1].config);
    for (const auto& item : model->named_parameters())
      if (item.key().find(part) != std::string::npos) item.value().set_requires_grad(false);
    return model;
  };
  for (const char* part : {"q_proj", "_proj", "embed_tokens", "lm_head", "norm"}) {
    const std::vector<at::Tensor> expected = testing::train_plain(frozen(part), 2, kSteps, loss_of);
    run_ranks(4, [&](World& world) {
      const Mesh mesh = world.mesh({.tp = 2});
      const auto model = frozen(part);
      const Sharded sharded = fully_shard(model, mesh);
      testing::train(model, sharded, mesh.loss(), kSteps, loss_of);
      testing::expect_close(testing::weights_of(sharded, model), owned_of(expected, mesh, *model),
                            concat("frozen ", part));
    });
  }
}

// Weights, activations and what travels of them in bf16; sums over ranks are wide.
TEST(TensorParallelMixtral, TrainsInBf16) {
  std::vector<double> expected;
  std::vector<double> losses;
  for (const auto& [ranks, into] : {std::pair{1, &expected}, std::pair{4, &losses}})
    run_ranks(ranks, [&, ranks = ranks, into = into](World& world) {
      const Mesh mesh = world.mesh({.tp = ranks});
      const auto model = build_language_model(mixtral(), {.seed = 3, .dtype = at::kBFloat16});
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
  for (size_t i = 0; i < expected.size(); ++i) EXPECT_NEAR(losses[i], expected[i], 0.01);
}

// --- logits --------------------------------------------------------------------------------------

TEST(TensorParallelLlama, HasAllLogitsOnEveryRank) {
  for (const SmallModel& each : dense_models()) {
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

// --- checkpoints ---------------------------------------------------------------------------------

// Weights and moments, under published names: from every grid into every other one.
TEST(ParallelMixtral, IsNotSeenInCheckpoints) {
  const std::vector<Grids> all = {{1, {}},        {2, {.ep = 2}}, {4, {.outer = 2, .ep = 2}},
                                  {4, {.ep = 4}}, {2, {.tp = 2}}, {4, {.ep = 4, .tp = 2}},
                                  {4, {.tp = 4}}};
  const auto trained = [](const Grids& grids, int first, int last, const auto& then) {
    run_ranks(grids.ranks, [&](World& world) {
      const Mesh mesh = world.mesh(grids.mesh);
      const auto model = build(mixtral());
      Sharded sharded = fully_shard(model, mesh);
      AdamW optimizer(sharded, {.lr = 0.01, .eps = 1e-3});  // else rounding decides tiny steps
      const CheckpointState state{.sharded = sharded, .optimizer = &optimizer};
      then(model, mesh, state, train::stored_name_rules(*model), [&] {
        for (int step = first; step < last; ++step) {
          loss_of(model, 0, step).backward();  // the same everywhere: the mean has no order
          optimizer.step();
          optimizer.zero_grad();
        }
      });
    });
  };
  std::vector<at::Tensor> expected;
  trained({1, {}}, 0, 4, [&](auto& model, const Mesh&, auto& state, const NameRules&, auto train) {
    train();
    expected = testing::weights_of(state.sharded, model);
  });
  for (const Grids& from : all) {
    const testing::TempDir directory;
    trained(from, 0, 2, [&](auto&, const Mesh&, auto& state, const NameRules& names, auto train) {
      train();
      save_checkpoint(directory.path(), state, {.step = 2}, {.form = {.names = names}});
    });
    for (const Grids& to : all)
      trained(to, 2, 4,
              [&](auto& model, const Mesh& mesh, auto& state, const NameRules& names, auto train) {
                load_checkpoint(directory.path(), state, {.names = names});
                train();
                testing::expect_close(testing::weights_of(state.sharded, model),
                                      owned_of(expected, mesh, *model),
                                      concat(text(from), " to ", text(to)));
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
  LlamaConfig predicting = llama();
  predicting.num_nextn_predict_layers = 1;
  EXPECT_THAT(error_of_sharding(predicting, 2),
              AllOf(HasSubstr("num_nextn_predict_layers is 1"), HasSubstr("tp = 2")));
  EXPECT_THAT(error_of_sharding(testing::small_hybrid(), 2),
              AllOf(HasSubstr("hybrid model"), HasSubstr("tp = 2")));
}

TEST(TensorParallelLlama, RefusesSequencesThatTheRanksCannotShareAndDecoding) {
  for (const int64_t vocabulary : {40, 37}) {
    LlamaConfig config = llama();
    config.vocab_size = vocabulary;
    run_ranks(2, [&](World& world) {
      const Mesh mesh = world.mesh({.tp = 2});
      const auto model = build(config);
      const Sharded sharded = fully_shard(model, mesh);
      const at::Tensor tokens = batch_of(0, 0).tokens.narrow(1, 0, 7);
      EXPECT_THAT(testing::error_of<UsageError>([&] { model->loss(tokens, tokens); }),
                  AllOf(HasSubstr("a sequence has 7 tokens"), HasSubstr("tp 2")));
      DecodingCache cache;
      EXPECT_THAT(testing::error_of<UsageError>([&] { model->next_logits(tokens, cache); }),
                  HasSubstr("tp = 2"));
    });
  }
}

}  // namespace
}  // namespace fsdp::nn::tensor_parallel_test
