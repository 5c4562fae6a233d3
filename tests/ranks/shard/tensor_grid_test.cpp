// Tensors that ranks of a tp group share out: the grids, and the same training as unsharded.
#include <gmock/gmock.h>

#include <cmath>

#include "fsdp/optim/adamw.h"
#include "support/parallel_training.h"

namespace fsdp::testing::tensor_grid_test {
namespace {

using ::testing::ElementsAre;
using namespace parallel;

std::vector<int64_t> world_ranks(const World& world, const MeshAxis& axis) {
  at::Tensor ranks = at::empty({axis.size()}, at::kLong);
  axis.gather().all_gather(ranks, at::full({1}, world.rank(), at::kLong), "ranks").wait();
  return {ranks.const_data_ptr<int64_t>(), ranks.const_data_ptr<int64_t>() + axis.size()};
}

TEST(TensorGrid, CoversTheRanksThatHaveTheSameSlices) {
  run_ranks(8, [](World& world) {
    const Mesh mesh = world.mesh({.outer = 2, .ep = 4, .tp = 2});
    EXPECT_EQ(mesh.num_losses(), 4);
    EXPECT_EQ(mesh.loss(), world.rank() / 2);
    EXPECT_EQ(mesh.grids().size(), 3u);
    const Grid tensors = mesh.grid(GridKind::kTensor);
    const std::vector<int64_t> tp = world_ranks(world, *tensors.owners);
    const std::vector<int64_t> inner = world_ranks(world, *tensors.inner);
    const std::vector<int64_t> outer = world_ranks(world, *tensors.outer);
    const std::vector<int64_t> row = world_ranks(world, mesh.inner());
    const std::vector<int64_t> ep = world_ranks(world, *mesh.ep());
    if (world.rank() != 5) return;
    EXPECT_THAT(tp, ElementsAre(4, 5));
    EXPECT_THAT(inner, ElementsAre(5, 7));
    EXPECT_THAT(outer, ElementsAre(1, 5));
    EXPECT_THAT(row, ElementsAre(4, 5, 6, 7));
    EXPECT_THAT(ep, ElementsAre(4, 5, 6, 7));
  });
  run_ranks(2, [](World& world) {
    const Mesh mesh = world.mesh();
    EXPECT_EQ(mesh.tp(), nullptr);
    EXPECT_EQ(mesh.grid(GridKind::kTensor).inner, &mesh.inner());
    EXPECT_EQ(mesh.num_losses(), 2);
    EXPECT_THAT(mesh.grids(), ElementsAre(GridKind::kDense));
  });
}

// Losses, gradients, norm, and the weights after steps of AdamW with clipping.
void train_like_the_whole(const Grids& grids, const ShardOptions& options,
                          const Expected& expected) {
  const std::string what =
      concat(text(grids), ", ", to_text(options.strategy), ", ", to_text(options.granularity));
  run_ranks(grids.ranks, [&](World& world) {
    const Mesh mesh = world.mesh(grids.mesh);
    ParallelModel model = parallel_model();
    const Sharded sharded = fully_shard(model, mesh, options);
    AdamW optimizer(sharded, kParallelAdamW);
    for (int step = 0; step < kParallelSteps; ++step) {
      const at::Tensor loss = loss_of(model, mesh.loss(), step);
      const double wanted =
          expected.losses[static_cast<size_t>(step)][static_cast<size_t>(mesh.loss())];
      EXPECT_NEAR(loss.item<double>(), wanted, 1e-4 * wanted) << what << " step " << step;
      loss.backward();
      if (step == 0) expect_gradients(sharded, mesh, expected.gradients, 1.0, what);
      optimizer.step();
      const double norm = expected.norms[static_cast<size_t>(step)];
      EXPECT_NEAR(optimizer.gradient_norm(), norm, 1e-4 * norm) << what << " step " << step;
      optimizer.zero_grad();
    }
    expect_owned_weights(sharded, mesh, model, expected.weights, what);
  });
}

// By number of losses.
std::map<int, Expected> train_whole_models() {
  std::map<int, Expected> all;
  for (const int num_losses : {1, 2, 4, 8}) all[num_losses] = train_whole(num_losses);
  return all;
}

TEST(TensorGrid, TrainsAsTheUnshardedModel) {
  const std::map<int, Expected> expected = train_whole_models();
  const std::span<const Strategy> strategies = named_strategies();
  size_t number = 0;
  for (const int ranks : {2, 4, 8})
    for (const Grids& grids : factorisations(ranks)) {
      ++number;
      for (size_t i = 0; i < strategies.size(); ++i) {
        // On eight ranks each one meets two or three strategies, in turn.
        if (ranks == 8 && (i + number) % 3 != 0) continue;
        train_like_the_whole(grids, {.strategy = strategies[i]}, expected.at(grids.num_losses()));
      }
    }
}

TEST(TensorGrid, GoesWithEveryPoolAndGranularity) {
  const Grids grids{4, {.ep = 4, .tp = 2}};
  const Expected expected = train_whole(grids.num_losses());
  for (const PoolKind pool :
       {PoolKind::kOnDemand, PoolKind::kDoubleBuffer, PoolKind::kMaxPool, PoolKind::kPlanned})
    train_like_the_whole(grids, {.pool = pool}, expected);
  for (const char* granularity : {"row", "tensor"})
    train_like_the_whole(grids, {.granularity = parse_granularity(granularity)}, expected);
}

// The ranks of a tp group count as one where losses are averaged, and where they are added up.
TEST(TensorGrid, AddsUpMicrobatchesAndSumsOfLosses) {
  for (const Grids& grids : {Grids{4, {.tp = 4}}, Grids{4, {.tp = 2}}, Grids{4, {.ep = 4, .tp = 2}},
                             Grids{4, {.outer = 2, .tp = 2}}, Grids{2, {.ep = 2, .tp = 2}}}) {
    const double num_losses = grids.num_losses();
    ParallelModel plain = parallel_model();
    for (int loss = 0; loss < grids.num_losses(); ++loss)
      for (int step = 0; step < 2; ++step) (loss_of(plain, loss, step) / num_losses).backward();
    Named gradients;
    for (const auto& item : plain->named_parameters()) gradients[item.key()] = item.value().grad();
    for (const Strategy& strategy : named_strategies())
      for (const GradientOf gradient : {GradientOf::kMeanOverRanks, GradientOf::kSumOverRanks})
        run_ranks(grids.ranks, [&](World& world) {
          const Mesh mesh = world.mesh(grids.mesh);
          ParallelModel model = parallel_model();
          const Sharded sharded =
              fully_shard(model, mesh, {.strategy = strategy, .gradient = gradient});
          for (int step = 0; step < 2; ++step) {
            sharded.microbatch({.last = step == 1});
            loss_of(model, mesh.loss(), step).backward();
          }
          const bool is_mean = gradient == GradientOf::kMeanOverRanks;
          expect_gradients(sharded, mesh, gradients, is_mean ? 1.0 : num_losses,
                           concat(text(grids), ", ", to_text(strategy), is_mean ? "" : ", sum"));
        });
  }
}

TEST(TensorGrid, SkipsAStepWithANanOfOneRanksSliceEverywhere) {
  run_ranks(4, [](World& world) {
    const Mesh mesh = world.mesh({.tp = 2});
    ParallelModel model = parallel_model();
    const Sharded sharded = fully_shard(model, mesh);
    AdamW optimizer(sharded, {.lr = 0.1, .step = {.on_nonfinite = OnNonfinite::kSkip}});
    const auto before = weights_of(sharded, model);
    loss_of(model, mesh.loss(), 0).backward();
    sharded.wait_gradients();
    for (const ShardedParameter& each : sharded.parameters()) {
      if (world.rank() != 3 || each.name != "first.row.weight") continue;
      ASSERT_GT(each.gradient.numel(), 0);
      each.gradient.fill_(std::nan(""));
    }
    optimizer.step();
    EXPECT_EQ(optimizer.state().skipped, 1);
    expect_equal(weights_of(sharded, model), before);
  });
}

TEST(TensorGrid, FindsANanOfOneRanksSliceEverywhere) {
  run_ranks(4, [](World& world) {
    const Mesh mesh = world.mesh({.tp = 4});  // no collective looks at the gradients of slices
    ParallelModel model = parallel_model();
    const Sharded sharded = fully_shard(model, mesh);
    loss_of(model, mesh.loss(), 0).backward();
    EXPECT_FALSE(sharded.found_nonfinite());
    if (world.rank() == 3)
      for (const ShardedParameter& each : sharded.parameters())
        if (each.name == "second.gated.weight") each.gradient.fill_(std::nan(""));
    EXPECT_TRUE(sharded.found_nonfinite());
  });
}

// A dense parameter is cut over all ranks, and a slice over those that have it.
TEST(TensorGrid, HoldsEveryElementOnceInTheOptimizer) {
  run_ranks(8, [](World& world) {
    const Mesh mesh = world.mesh({.ep = 4, .tp = 2});
    ParallelModel model = parallel_model();
    const Sharded sharded = fully_shard(model, mesh);
    for (const ShardedParameter& each : sharded.parameters()) {
      at::Tensor held = at::full({1}, each.main_weight.numel(), at::kLong);
      mesh.inner().gather().all_reduce(held, {}, "held").wait();
      int64_t numel = 1;
      for (const int64_t size : each.shape) numel *= size;
      const bool is_expert = each.name.find("experts") != std::string::npos;
      const bool is_slice = each.name.find("column") != std::string::npos ||
                            each.name.find("gated") != std::string::npos ||
                            each.name.find("row.weight") != std::string::npos;
      EXPECT_EQ(held.item<int64_t>(), numel * (is_expert ? 4 : is_slice ? 2 : 1)) << each.name;
    }
  });
}

TEST(TensorGrid, BeginsWithTheValuesOfRankZero) {
  ParallelModel plain = parallel_model();
  run_ranks(4, [&](World& world) {
    const Mesh mesh = world.mesh({.ep = 2, .tp = 2});
    ParallelModel model = parallel_model(/*seed=*/7 + static_cast<uint64_t>(world.rank()));
    const Sharded sharded =
        fully_shard(model, mesh, {.initial_values = InitialValues::kOfRankZero});
    const auto whole = sharded.full_parameters();
    for (const auto& item : plain->named_parameters())
      EXPECT_TRUE(at::equal(model->named_parameters()[item.key()],
                            owned_by(mesh, item.key(), item.value())))
          << item.key();
  });
}

}  // namespace
}  // namespace fsdp::testing::tensor_grid_test
