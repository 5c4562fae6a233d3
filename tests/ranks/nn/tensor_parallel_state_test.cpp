// The values of language models that the ranks of a tp group have slices of: the first ones, and
// those in checkpoints, are of the whole model.
#include <gtest/gtest.h>

#include "fsdp/base/text.h"
#include "fsdp/checkpoint/checkpointer.h"
#include "fsdp/checkpoint/load.h"
#include "fsdp/optim/adamw.h"
#include "fsdp/shard/parameter_init.h"
#include "fsdp/train/model/trained_model.h"
#include "support/one_in.h"
#include "support/sharded_training.h"
#include "support/temp_dir.h"
#include "support/tensor_parallel_models.h"

namespace fsdp::nn::tensor_parallel_state_test {
namespace {

using namespace tensor_parallel;
using testing::run_ranks;

// --- first values --------------------------------------------------------------------------------

// Cut from the whole model's, also where every module is initialised only when it is sharded.
TEST(TensorParallelModel, BeginsWithTheValuesOfTheWholeModel) {
  std::vector<SmallModel> models = hybrid_models();
  models.push_back({"predicting_mixtral", predicting_mixtral()});
  models.push_back({"deepseek", deepseek()});
  models.push_back({"qwen3_next", qwen3_next()});
  for (const SmallModel& each : models) {
    const auto whole = build_language_model(each.config, {.seed = 3});
    run_ranks(4, [&](World& world) {
      const Mesh mesh = world.mesh({.tp = 4});
      const auto model = [&] {
        const MetaConstruction without_memory;
        return build_language_model(each.config, {.seed = 3});
      }();
      const Sharded sharded = fully_shard(model, mesh);
      testing::expect_equal(testing::weights_of(sharded, model),
                            owned_of(whole->parameters(), mesh, *model), each.name);
    });
  }
}

// --- checkpoints ---------------------------------------------------------------------------------

// Weights and moments, under published names: from every grid into every other one.
void resume_on_all_grids(const SmallModel& each, const std::vector<Grids>& all) {
  const auto trained = [&](const Grids& grids, int first, int last, const auto& then) {
    run_ranks(grids.ranks, [&](World& world) {
      const Mesh mesh = world.mesh(grids.mesh);
      const auto model = build(each.config);
      Sharded sharded = fully_shard(model, mesh);
      AdamW optimizer(sharded, {.lr = 0.01, .eps = 0.1});  // else rounding decides small steps
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
  static testing::OneIn few(5);  // goes on from model to model
  for (const Grids& from : all) {
    const testing::TempDir directory;
    trained(from, 0, 2, [&](auto&, const Mesh&, auto& state, const NameRules& names, auto train) {
      train();
      save_checkpoint(directory.path(), state, {.step = 2}, {.form = {.names = names}});
    });
    for (const Grids& to : all) {
      if (few.skips()) continue;
      trained(to, 2, 4,
              [&](auto& model, const Mesh& mesh, auto& state, const NameRules& names, auto train) {
                load_checkpoint(directory.path(), state, {.names = names});
                train();
                testing::expect_close(testing::weights_of(state.sharded, model),
                                      owned_of(expected, mesh, *model),
                                      concat(each.name, ", ", text(from), " to ", text(to)));
              });
    }
  }
}

TEST(TensorParallelModel, IsNotSeenInCheckpoints) {
  const std::vector<Grids> by_tensor = {{1, {}}, {2, {.tp = 2}}, {4, {.tp = 4}}};
  const std::vector<Grids> by_both = {{1, {}}, {4, {.ep = 4}}, {4, {.ep = 2, .tp = 2}}};
  resume_on_all_grids(
      {"predicting_mixtral", predicting_mixtral()},
      {{1, {}}, {4, {.outer = 2, .ep = 2}}, {4, {.ep = 4, .tp = 2}}, {2, {.tp = 2}}});
  resume_on_all_grids(hybrid_models()[2], by_tensor);
  resume_on_all_grids({"hybrid_experts", expert_hybrid()}, by_both);
  resume_on_all_grids({"deepseek", deepseek()}, by_both);
  resume_on_all_grids({"qwen3_next", qwen3_next()}, by_both);
}

}  // namespace
}  // namespace fsdp::nn::tensor_parallel_state_test
