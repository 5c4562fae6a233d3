// Experts that ranks share out, and tensors that ranks of a tp group do: the grids, and the same
// training as unsharded.
#include <gmock/gmock.h>

#include <cmath>

#include "fsdp/optim/adamw.h"
#include "support/one_in.h"
#include "support/parallel_training.h"

namespace fsdp::testing::tensor_grid_test {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using namespace parallel;

std::vector<int64_t> world_ranks(const World& world, const MeshAxis& axis) {
  at::Tensor ranks = at::empty({axis.size()}, at::kLong);
  axis.gather().all_gather(ranks, at::full({1}, world.rank(), at::kLong), "ranks").wait();
  return {ranks.const_data_ptr<int64_t>(), ranks.const_data_ptr<int64_t>() + axis.size()};
}

TEST(TensorGrid, CoversTheRanksThatHaveTheSameSlices) {
  run_ranks(8, [](World& world) {
    const Mesh mesh = world.mesh({.outer = 2, .ep = 4, .tp = 2});
    EXPECT_EQ(mesh.data_parallel_size(), 4);
    EXPECT_EQ(mesh.data_parallel_rank(), world.rank() / 2);
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
    EXPECT_EQ(mesh.data_parallel_size(), 2);
    EXPECT_THAT(mesh.grids(), ElementsAre(GridKind::kDense));
  });
}

TEST(ExpertGrid, CoversTheRanksThatHaveTheSameExperts) {
  run_ranks(8, [](World& world) {
    const Mesh mesh = world.mesh({.outer = 2, .ep = 2});
    const Grid experts = mesh.grid(GridKind::kExpert);
    const std::vector<int64_t> ep = world_ranks(world, *mesh.ep());
    const std::vector<int64_t> inner = world_ranks(world, *experts.inner);
    const std::vector<int64_t> outer = world_ranks(world, *experts.outer);
    if (world.rank() != 5) return;
    EXPECT_THAT(ep, ElementsAre(4, 5));
    EXPECT_THAT(inner, ElementsAre(5, 7));
    EXPECT_THAT(outer, ElementsAre(1, 5));
  });
  run_ranks(8, [](World& world) {  // an ep group of two rows
    const Mesh mesh = world.mesh({.outer = 4, .ep = 4});
    EXPECT_EQ(mesh.ep()->size(), 4);
    EXPECT_EQ(mesh.grid(GridKind::kExpert).inner->size(), 1);
    EXPECT_EQ(mesh.grid(GridKind::kExpert).outer->size(), 2);
  });
}

TEST(ExpertGrid, OfSizesThatDoNotFitShowsTheArithmetic) {
  run_ranks(4, [](World& world) {
    for (const MeshOptions& options : {MeshOptions{.ep = 3}, {.ep = 0}, {.ep = 8}})
      EXPECT_THAT(error_of([&] { world.mesh(options); }),
                  AllOf(HasSubstr(concat("ep is ", options.ep)),
                        HasSubstr("4 ranks = 1 outer x 4 inner: it must divide 4")));
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
      const at::Tensor loss = loss_of(model, mesh.data_parallel_rank(), step);
      const double wanted =
          expected
              .losses[static_cast<size_t>(step)][static_cast<size_t>(mesh.data_parallel_rank())];
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
  for (const int data_parallel_size : {1, 2, 4, 8})
    all[data_parallel_size] = train_whole(data_parallel_size);
  return all;
}

TEST(TensorGrid, TrainsAsTheUnshardedModel) {
  const std::map<int, Expected> expected = train_whole_models();
  const std::span<const Strategy> strategies = named_strategies();
  size_t number = 0;
  testing::OneIn few(5);
  for (const int ranks : {2, 4, 8})
    for (const Grids& grids : factorisations(ranks)) {
      ++number;
      for (size_t i = 0; i < strategies.size(); ++i) {
        // On eight ranks each one meets two or three strategies, in turn.
        if ((ranks == 8 && (i + number) % 3 != 0) || few.skips()) continue;
        train_like_the_whole(grids, {.strategy = strategies[i]},
                             expected.at(grids.data_parallel_size()));
      }
    }
}

TEST(TensorGrid, GoesWithEveryGranularity) {
  const Grids grids{4, {.ep = 4, .tp = 2}};
  const Expected expected = train_whole(grids.data_parallel_size());
  for (const char* granularity : {"row", "tensor"})
    train_like_the_whole(grids, {.granularity = parse_granularity(granularity)}, expected);
}

// The ranks of a tp group count as one where losses are averaged, and where they are added up.
TEST(TensorGrid, AddsUpMicrobatchesAndSumsOfLosses) {
  testing::OneIn few(5);
  for (const Grids& grids :
       {Grids{4, {.tp = 4}}, Grids{4, {.tp = 2}}, Grids{4, {.ep = 4, .tp = 2}},
        Grids{4, {.outer = 2, .tp = 2}}, Grids{2, {.ep = 2, .tp = 2}}, Grids{4, {.ep = 4}}}) {
    const double data_parallel_size = grids.data_parallel_size();
    ParallelModel plain = parallel_model();
    for (int loss = 0; loss < grids.data_parallel_size(); ++loss)
      for (int step = 0; step < 2; ++step)
        (loss_of(plain, loss, step) / data_parallel_size).backward();
    Named gradients;
    for (const auto& item : plain->named_parameters()) gradients[item.key()] = item.value().grad();
    for (const Strategy& strategy : named_strategies())
      for (const GradientOf gradient : {GradientOf::kMeanOverRanks, GradientOf::kSumOverRanks}) {
        if (few.skips()) continue;
        run_ranks(grids.ranks, [&](World& world) {
          const Mesh mesh = world.mesh(grids.mesh);
          ParallelModel model = parallel_model();
          const Sharded sharded =
              fully_shard(model, mesh, {.strategy = strategy, .gradient = gradient});
          for (int step = 0; step < 2; ++step) {
            sharded.microbatch({.last = step == 1});
            loss_of(model, mesh.data_parallel_rank(), step).backward();
          }
          const bool is_mean = gradient == GradientOf::kMeanOverRanks;
          expect_gradients(sharded, mesh, gradients, is_mean ? 1.0 : data_parallel_size,
                           concat(text(grids), ", ", to_text(strategy), is_mean ? "" : ", sum"));
        });
      }
  }
}

// Makes a gradient of the last rank, which no collective looks at any more, NaN.
void spoil(const Sharded& sharded, const std::string& parameter) {
  for (const ShardedParameter& each : sharded.parameters()) {
    if (each.name != parameter) continue;
    ASSERT_GT(each.gradient.numel(), 0);
    each.gradient.fill_(std::nan(""));
  }
}

TEST(TensorGrid, FindsANanOfOneRanksSliceEverywhereAndSkipsTheStep) {
  for (const auto& [options, parameter] :
       {std::pair<MeshOptions, const char*>{{.tp = 2}, "first.row.weight"},
        {{.ep = 4}, "first.experts.weight"},
        {{.tp = 4}, "second.gated.weight"}})
    run_ranks(4, [&, options = options, parameter = parameter](World& world) {
      const Mesh mesh = world.mesh(options);
      ParallelModel model = parallel_model();
      const Sharded sharded = fully_shard(model, mesh);
      AdamW optimizer(sharded, {.lr = 0.1, .step = {.on_nonfinite = OnNonfinite::kSkip}});
      const auto before = weights_of(sharded, model);
      loss_of(model, mesh.data_parallel_rank(), 0).backward();
      EXPECT_FALSE(sharded.found_nonfinite());
      if (world.rank() == 3) spoil(sharded, parameter);
      if (options.tp == 4) {  // one rank per grid: found_nonfinite() looks at main gradients
        EXPECT_TRUE(sharded.found_nonfinite());
      }
      optimizer.step();
      EXPECT_EQ(optimizer.state().skipped, 1);
      expect_equal(weights_of(sharded, model), before);
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

}  // namespace
}  // namespace fsdp::testing::tensor_grid_test
