// Gradients of lanes have the same bits on any number of ranks.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <mutex>
#include <string>
#include <vector>

#include "support/parallel_training.h"
#include "support/rank_pattern.h"

namespace fsdp::testing::lane_gradients_test {
namespace {

using namespace parallel;

constexpr int kLanes = 8;
constexpr int kSteps = 3;

struct Case {
  Grids grids;
  ShardOptions options;

  std::string text() const {
    return concat(parallel::text(grids), ", ", to_text(options.strategy), ", pool ",
                  name_of(options.pool));
  }
};

struct Outcome {
  Named gradients;             // of the first step, on the ranks that own them
  Named weights;               // whole, of rank 0
  std::vector<double> losses;  // by step and lane
  std::vector<double> norms;   // by step
};

// The parts of all ranks in their places.
void place(const ShardedParameter& each, Named& whole) {
  at::Tensor& tensor = whole[each.name];
  if (!tensor.defined()) {
    int64_t numel = 1;
    for (const int64_t size : each.shape) numel *= size;
    tensor = at::zeros({numel}, each.gradient.options());
  }
  tensor.narrow(0, each.begin, each.gradient.numel()).copy_(each.gradient.flatten());
}

Outcome trained(const Case& one) {
  Outcome outcome;
  outcome.losses.resize(kSteps * kLanes);
  std::mutex mutex;
  run_ranks(one.grids.ranks, [&](World& world) {
    const Mesh mesh = world.mesh(one.grids.mesh);
    ParallelModel model = parallel_model();
    ShardOptions options = one.options;
    options.lanes = kLanes;
    const Sharded sharded = fully_shard(model, mesh, options);
    AdamW optimizer(sharded, kParallelAdamW);  // clips
    for (int step = 0; step < kSteps; ++step) {
      for (int64_t i = 0; i < sharded.micro_steps(); ++i) {
        const auto lane = static_cast<int>(sharded.lane());
        const at::Tensor input = input_for(lane, step, {kTokens, kHidden});
        const at::Tensor loss =
            model(input.to(one.options.precision.params.value_or(at::kFloat))).square().mean();
        loss.backward();
        const std::lock_guard lock(mutex);
        outcome.losses[static_cast<size_t>(step * kLanes + lane)] = loss.item<double>();
      }
      if (step == 0) {
        sharded.wait_gradients();
        const std::lock_guard lock(mutex);
        // With ep or tp there are slices of the same names.
        if (one.grids.mesh.tp * one.grids.mesh.ep == 1)
          for (const ShardedParameter& each : sharded.parameters()) place(each, outcome.gradients);
      }
      optimizer.step();
      if (const double norm = optimizer.gradient_norm(); world.rank() == 0)
        outcome.norms.push_back(norm);
      optimizer.zero_grad();
    }
    const auto whole = sharded.full_parameters();
    if (world.rank() > 0) return;
    for (const auto& item : model->named_parameters())
      outcome.weights[item.key()] = item.value().detach().clone();
  });
  return outcome;
}

void expect_same(const Outcome& actual, const Outcome& expected, const std::string& what) {
  EXPECT_EQ(actual.losses, expected.losses) << what;
  EXPECT_EQ(actual.norms, expected.norms) << what;
  for (const auto& [name, tensor] : expected.weights)
    EXPECT_TRUE(same_bytes(actual.weights.at(name), tensor)) << what << " " << name;
  for (const auto& [name, tensor] : expected.gradients)
    EXPECT_TRUE(same_bytes(actual.gradients.at(name), tensor)) << what << " gradient of " << name;
}

std::vector<Strategy> strategies(int outer) {
  std::vector<Strategy> all = {Strategy::no_shard, Strategy::optim, Strategy::optim_grads,
                               Strategy::optim_grads_params};
  if (outer == 1) return all;
  for (const Strategy& one : {Strategy::optim, Strategy::optim_grads, Strategy::optim_grads_params})
    all.push_back(one.hfsdp());
  return all;
}

TEST(Lanes, HaveTheSameBitsOnAnyNumberOfRanks) {
  for (const bool has_narrow_wire : {false, true}) {
    ShardOptions options;
    if (has_narrow_wire)
      options.precision = {.params = at::kBFloat16,
                           .main_params = at::kFloat,
                           .main_grads = at::kFloat,
                           .grad_comm = at::kBFloat16};
    const Outcome expected = trained({.grids = {1, {}}, .options = options});
    ASSERT_LT(expected.losses[2 * kLanes], expected.losses[0]) << "it learns";
    int trial = 0;
    for (const int ranks : {1, 2, 4, 8})
      for (int outer = 1; outer <= ranks; outer *= 2)
        for (const Strategy& strategy : strategies(outer)) {
          Case one{.grids = {ranks, {.outer = outer}}, .options = options};
          one.options.strategy = strategy;
          const auto& pools = all_pool_kinds();
          one.options.pool = pools[static_cast<size_t>(trial) % pools.size()];
          one.options.gradient_lifetime =
              trial % 2 == 0 ? GradientLifetime::kPersistent : GradientLifetime::kStep;
          ++trial;
          expect_same(trained(one), expected, one.text() + (has_narrow_wire ? ", bf16" : ""));
        }
  }
}

TEST(Lanes, HaveTheSameBitsBesideFixedAxesOfLayers) {
  for (const MeshOptions& axes :
       {MeshOptions{.ep = 2}, MeshOptions{.tp = 2}, MeshOptions{.ep = 2, .tp = 2}}) {
    const int fewest = axes.ep * axes.tp;
    const Outcome expected = trained({.grids = {fewest, axes}, .options = {}});
    for (int ranks = fewest; ranks <= 8; ranks *= 2)
      for (int outer = 1; ranks / outer >= fewest; outer *= 2) {
        MeshOptions mesh = axes;
        mesh.outer = outer;
        const Case one{.grids = {ranks, mesh}, .options = {}};
        expect_same(trained(one), expected, one.text());
      }
  }
}

TEST(Lanes, AreTheMeanOfAPlainModel) {
  const Expected plain = train_whole(kLanes);
  const Outcome outcome = trained({.grids = {4, {.outer = 2}}, .options = {}});
  for (const auto& [name, gradient] : plain.gradients)
    EXPECT_TRUE(at::allclose(outcome.gradients.at(name), gradient.flatten(), 1e-4, 1e-7)) << name;
  for (size_t step = 0; step < kSteps; ++step)
    EXPECT_NEAR(outcome.norms[step], plain.norms[step], 1e-5 * plain.norms[step]) << step;
}

// --- a cycle -------------------------------------------------------------------------------------

template <typename Body>
std::string words_of(const Body& body) {
  try {
    body();
  } catch (const UsageError& error) {
    return error.what();
  }
  return "";
}

TEST(Lanes, AreAllOfACycle) {
  run_ranks(2, [](World& world) {
    const Mesh mesh = world.mesh();
    ParallelModel model = parallel_model();
    const Sharded sharded = fully_shard(model, mesh, {.lanes = 4});
    EXPECT_EQ(sharded.micro_steps(), 2);
    EXPECT_EQ(sharded.lane(), world.rank());
    AdamW optimizer(sharded, {});
    loss_of(model, 0, 0).backward();
    EXPECT_EQ(sharded.lane(), 2 + world.rank());
    EXPECT_EQ(words_of([&] { optimizer.step(); }),
              "step() comes after 1 backwards of this cycle; lanes is 4, which are 2 backwards on "
              "each of these ranks");
    loss_of(model, 0, 0).backward();
    EXPECT_EQ(sharded.lane(), world.rank()) << "of the next cycle";
    EXPECT_EQ(words_of([&] { loss_of(model, 0, 0).backward(); }),
              "lanes is 4, so a cycle has 2 backwards on each of these ranks, and all of them have "
              "come; call zero_grad() before the next one");
    sharded.reset();
  });
}

TEST(Lanes, RefuseWhatWouldDependOnRanks) {
  const auto refused = [](const MeshOptions& axes, const ShardOptions& options) {
    std::string words;
    run_ranks(axes.outer * axes.ep * axes.tp, [&](World& world) {
      const Mesh mesh = world.mesh(axes);
      ParallelModel model = parallel_model();
      const std::string own = words_of([&] { fully_shard(model, mesh, options); });
      if (world.rank() == 0) words = own;
    });
    return words;
  };
  using ::testing::HasSubstr;
  EXPECT_EQ(refused({}, {.lanes = 3}), "lanes is 3; it must be a power of two, or 0 for none");
  EXPECT_THAT(refused({.outer = 4}, {.lanes = 2}), HasSubstr("lanes is 2 for 4 ranks"));
  EXPECT_THAT(refused({.tp = 3}, {.lanes = 2}), HasSubstr("they must be powers of two"));
  EXPECT_THAT(refused({.tp = 2}, {.strategy = Strategy::optim, .lanes = 4}),
              HasSubstr("gradients must be sharded along the inner axis"));
  EXPECT_THAT(refused({}, {.precision = {.params = at::kBFloat16}, .lanes = 2}),
              HasSubstr("set precision.main_grads to fp32"));
}

}  // namespace
}  // namespace fsdp::testing::lane_gradients_test
