// Language models that the ranks of a tp group compute together: the same losses, weights and
// logits as of the whole model.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>

#include "fsdp/base/error.h"
#include "fsdp/base/text.h"
#include "fsdp/comm/communicator.h"
#include "support/one_in.h"
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

Trained train_whole(const ModelConfig& config, int data_parallel_size) {
  Trained trained;
  trained.losses.resize(kSteps);
  trained.weights = testing::train_plain(
      build(config), data_parallel_size, kSteps, [&](const auto& model, int loss, int step) {
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
  Strategy strategy;
  Recompute recompute = Recompute::kNone;
};

void train_like_the_whole(const SmallModel& each, const Grids& grids, const Trained& expected,
                          const How& how) {
  const std::string what = concat(each.name, ", ", text(grids), ", ", to_text(how.strategy),
                                  how.recompute == Recompute::kBlock ? ", recomputed" : "");
  run_ranks(grids.ranks, [&](World& world) {
    const Mesh mesh = world.mesh(grids.mesh);
    const auto model = build(each.config, how.recompute);
    const Sharded sharded = fully_shard(model, mesh, {.strategy = how.strategy});
    testing::train(model, sharded, mesh.data_parallel_rank(), kSteps,
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

struct ModelOnGrids {
  SmallModel model;
  int most_ep = 1;
};

std::vector<ModelOnGrids> all_models() {
  std::vector<ModelOnGrids> all;
  for (const std::vector<SmallModel>& models :
       {dense_models(), predicting_models(), hybrid_models()})
    for (const SmallModel& each : models) all.push_back({each});
  DeepseekV3Config direct = deepseek();
  direct.q_lora_rank = 0;
  direct.decoder.attention_bias = direct.decoder.tie_word_embeddings = true;
  direct.decoder.vocab_size = 37;
  all.push_back({{"deepseek_direct", direct}});
  all.push_back({{"mixtral", mixtral()}, 8});
  all.push_back({{"predicting_mixtral", predicting_mixtral()}, 4});
  all.push_back({{"hybrid_experts", expert_hybrid()}, 4});
  all.push_back({{"deepseek", deepseek()}, 4});
  all.push_back({{"qwen3_next", qwen3_next()}, 4});
  return all;
}

// Grids meet strategies, and blocks that are recomputed or not, in turn. The counts go on from
// model to model, so that `make test` does not take the same ones of each; ten grids without ep,
// seven strategies and two ways to recompute have no divisor in common with nine.
TEST(TensorParallelModel, LearnsWhatTheWholeModelLearns) {
  const std::span<const Strategy> strategies = named_strategies();
  size_t number = 0;
  testing::OneIn few(9);
  for (const auto& [model, most_ep] : all_models())
    for (const int ranks : {2, 4, 8}) {
      std::map<int, Trained> expected;  // by number of losses
      for (const Grids& grids : grids_of(ranks, most_ep)) {
        const How how{strategies[number % strategies.size()],
                      number / strategies.size() % 2 == 0 ? Recompute::kNone : Recompute::kBlock};
        ++number;
        if (few.skips()) continue;
        const int data_parallel_size = grids.data_parallel_size();
        if (!expected.contains(data_parallel_size))
          expected[data_parallel_size] = train_whole(model.config, data_parallel_size);
        train_like_the_whole(model, grids, expected.at(data_parallel_size), how);
      }
    }
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
      testing::train(model, sharded, mesh.data_parallel_rank(), kSteps, loss_of);
      testing::expect_close(testing::weights_of(sharded, model), owned_of(expected, mesh, *model),
                            concat(each.name, ", frozen ", part));
    });
  };
  for (const char* part : {"q_proj", "_proj", "embed_tokens"})
    learns_the_same(dense_models()[1], part);
  for (const char* part : {"conv1d", "mixer"}) learns_the_same(hybrid_models()[1], part);
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
  // A vocabulary that two ranks share, and one that they cannot.
  for (const SmallModel& each : {dense_models()[0], dense_models()[5], hybrid_models()[0]}) {
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
      testing::train(model, sharded, mesh.data_parallel_rank(), kSteps, loss_of_logits);
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
  LlamaConfig odd = llama();
  odd.intermediate_size = 29;
  EXPECT_THAT(error_of_sharding(odd, 2),
              AllOf(HasSubstr("mlp.gate_proj.weight"), HasSubstr("29"), HasSubstr("tp 2")));
}

TEST(TensorParallelModel, RefusesSequencesThatTheRanksCannotShareAndDecoding) {
  for (const SmallModel& each : {dense_models()[0], dense_models()[4]})
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
