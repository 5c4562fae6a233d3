// Muon on language models of every kind: what their modules declare, and what a plan forecasts.
#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "fsdp/optim/muon.h"
#include "fsdp/plan/forecast.h"
#include "fsdp/plan/group_plan.h"
#include "fsdp/plan/model_tensors.h"
#include "fsdp/shard/engine/engine.h"
#include "fsdp/shard/fully_shard.h"
#include "support/one_in.h"
#include "support/optimizer_training.h"
#include "support/small_models.h"

namespace fsdp::muon_models_test {
namespace {

using testing::build;
using testing::run_ranks;
using testing::test_device;

// The owners of every group with matrices, in the order of units.
using Owners = std::vector<std::vector<std::vector<int64_t>>>;

Owners owners_in(const Sharded& sharded) {
  Owners owners;
  for (const auto& unit : EngineAccess::of(sharded).units())
    for (const ParamGroup& group : unit->groups())
      if (group.has_matrices()) owners.push_back(group.layout().request().matrix_owners);
  return owners;
}

Owners owners_in(const Planner& planner) {
  Owners owners;
  for (const GroupPlan& group : planner.groups())
    if (group.has_matrices()) owners.push_back(group.layout.request().matrix_owners);
  return owners;
}

// Whether the tensors of some group lie in another order than its members have.
bool has_other_order(const Sharded& sharded) {
  for (const auto& unit : EngineAccess::of(sharded).units())
    for (const ParamGroup& group : unit->groups())
      for (int64_t i = 1; i < group.layout().num_tensors(); ++i)
        if (group.layout().tensor_range(i).begin < group.layout().tensor_range(i - 1).begin)
          return true;
  return false;
}

// Fused projections, experts and everything else that modules declare: sharded as unsharded, and
// with the owners and the bytes that a plan forecasts.
TEST(MuonModels, TrainAsIfUnsharded) {
  struct Case {
    testing::SmallModel model;
    int ranks = 3;
    MeshOptions mesh = {};
  };
  std::vector<Case> cases;
  for (const testing::SmallModel& model : testing::small_models()) cases.push_back({model});
  cases.push_back({{"experts_on_two_ranks", testing::aligned_mixtral()}, 4, {.ep = 2}});
  cases.push_back({{"outer", testing::small_llama()}, 4, {.outer = 2}});
  int num_in_other_order = 0;
  testing::OneIn few(5);
  for (const auto& [small, ranks, axes] : cases) {
    if (few.skips()) continue;
    SCOPED_TRACE(small.name);
    int64_t most_bytes = 0;
    const auto train = [&](const Strategy& strategy, const auto& look) {
      std::mutex mutex;
      run_ranks(ranks, [&](World& world) {
        const Mesh mesh = world.mesh(axes);
        const auto model = build([&] { return build_language_model(small.config, {.seed = 3}); });
        model->to(test_device());
        const Sharded sharded =
            fully_shard(model, mesh, {.strategy = strategy, .matrices = {.declared = true}});
        Muon optimizer(sharded,
                       {.lr = 0.01, .products_dtype = at::kFloat, .step = {.marks_changes = true}});
        for (int step = 0; step < 2; ++step) {
          testing::small_loss(*model, testing::small_tokens(world.rank(), step).to(test_device()))
              .total.backward();
          optimizer.step();
          optimizer.zero_grad();
        }
        optimizer.wait();
        const MemoryReport memory = sharded.memory();
        const std::lock_guard lock(mutex);
        most_bytes = std::max(most_bytes, memory.total_bytes() - memory.pool_bytes);
        // Ranks of an ep group have experts of their own by the same names.
        look(sharded, mesh.ep() == nullptr ? 0 : mesh.ep()->rank());
      });
    };
    std::map<std::pair<int, std::string>, at::Tensor> unsharded;
    train(Strategy::no_shard, [&](const Sharded& sharded, int ep_rank) {
      for (const ShardedParameter& parameter : sharded.parameters())
        unsharded[{ep_rank, parameter.name}] = parameter.main_weight.clone();
    });
    const Planner planner(build_model(small.name, small.config), {.ranks = ranks,
                                                                  .outer = axes.outer,
                                                                  .ep = axes.ep,
                                                                  .compute = DType::kFloat32,
                                                                  .muon = DType::kFloat32,
                                                                  .marks_changes = true});
    most_bytes = 0;
    int64_t num_compared = 0;
    train(Strategy::optim_grads_params, [&](const Sharded& sharded, int ep_rank) {
      EXPECT_EQ(owners_in(sharded), owners_in(planner));
      num_in_other_order += has_other_order(sharded) ? 1 : 0;
      for (const ShardedParameter& parameter : sharded.parameters()) {
        const int64_t numel = parameter.main_weight.numel();
        const at::Tensor& whole = unsharded.at({ep_rank, parameter.name});
        EXPECT_TRUE(at::equal(parameter.main_weight, whole.narrow(0, parameter.begin, numel)))
            << parameter.name;
        num_compared += numel;
      }
    });
    int64_t num_unsharded = 0;
    for (const auto& [key, value] : unsharded) num_unsharded += key.first == 0 ? value.numel() : 0;
    EXPECT_GE(num_compared, num_unsharded);  // together ranks hold all of it
    const MemoryBytes planned = planner.forecast().bytes;
    EXPECT_EQ(most_bytes, planned.total() - planned.weight_pool - planned.grad_pool);
  }
  EXPECT_GT(num_in_other_order, 0);
}

TEST(MuonModels, AreRefusedWhereRanksShareMatrices) {
  run_ranks(2, [](World& world) {
    const Mesh mesh = world.mesh({.tp = 2});
    LlamaConfig config = testing::small_llama();
    config.intermediate_size = 30;
    const auto model = build([&] { return build_language_model(config, {.seed = 3}); });
    EXPECT_THAT(
        testing::error_of([&] { fully_shard(model, mesh, {.matrices = {.declared = true}}); }),
        ::testing::HasSubstr("is cut over the 2 ranks of a tp group, so none has a whole matrix of "
                             "it; leave tp out, or name it in matrices.except"));
  });
}

}  // namespace
}  // namespace fsdp::muon_models_test
