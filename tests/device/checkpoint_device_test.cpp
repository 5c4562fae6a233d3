// Checkpoints of models on a GPU: to CPU ranks and back, beside running steps, between replays.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <string>
#include <tuple>
#include <vector>

#include "fsdp/base/text.h"
#include "fsdp/graph/graph.h"
#include "support/checkpoint_training.h"
#include "support/require.h"

namespace fsdp::testing::checkpoint_device_test {
namespace {

Training on_gpu(int ranks = 2) {
  Training run{.ranks = ranks, .compute = at::kBFloat16};
  run.shard.precision.main_grads = at::kFloat;
  run.where = c10::Device(c10::kCUDA, 0);
  return run;
}

WholeState save_after(const Training& run, int steps, const std::string& directory) {
  return run_training(run, [&](TrainingRank& rank) {
    rank.train(0, steps);
    save_checkpoint(directory, rank.state(), {.step = steps});
  });
}

WholeState load_and_save(const Training& run, const std::string& from, const std::string& to) {
  return run_training(run, [&](TrainingRank& rank) {
    const LoadedCheckpoint loaded = load_checkpoint(from, rank.state());
    save_checkpoint(to, rank.state(), {.step = loaded.step});
  });
}

// How much is on the host, how main weights are stored, what moments are kept in.
using Case = std::tuple<double, MainStorage, at::ScalarType>;
class CheckpointOnDevice : public ::testing::TestWithParam<Case> {};

TEST_P(CheckpointOnDevice, GoesToCpuRanksAndBackAndOnWithTheSameBits) {
  FSDP_REQUIRE_GPU();
  const auto& [fraction, storage, moment] = GetParam();
  for (const char* strategy : {"optim", "optim_grads_params"}) {
    SCOPED_TRACE(strategy);
    Training run = on_gpu();
    run.shard.strategy = parse_strategy(strategy);
    run.shard.offload.fraction = fraction;
    run.shard.precision.main_storage = storage;
    run.adamw.first_moment = run.adamw.second_moment = moment;
    const TempDir first;
    const TempDir second;
    const WholeState straight = run_training(run, [](TrainingRank& rank) { rank.train(0, 6); });
    const WholeState saved = save_after(run, 3, first.path());
    Training elsewhere = run;
    elsewhere.where = c10::kCPU;
    elsewhere.shard.offload.fraction = 0.4;
    // Scales belong to 128 elements of a shard, so other shards would round anew.
    if (moment == at::kFloat) elsewhere.ranks = 3;
    expect_same_state(load_and_save(elsewhere, first.path(), second.path()), saved, "on CPUs");
    const WholeState resumed = run_training(run, [&](TrainingRank& rank) {
      rank.train(0, 1);  // so that there are values to replace
      EXPECT_EQ(load_checkpoint(second.path(), rank.state()).step, 3);
      rank.train(3, 6);
    });
    expect_same_state(resumed, straight, "back on the GPU");
  }
}

std::string name_of_case(const ::testing::TestParamInfo<Case>& test) {
  const auto& [fraction, storage, moment] = test.param;
  return concat(name_of(storage), "_", c10::toString(moment), "_offload_",
                static_cast<int>(100 * fraction));
}

INSTANTIATE_TEST_SUITE_P(
    States, CheckpointOnDevice,
    ::testing::Combine(::testing::Values(0.0, 0.5, 1.0),
                       ::testing::Values(MainStorage::kSplit, MainStorage::kSeparate),
                       ::testing::Values(at::kFloat, at::kBFloat16, at::kFloat8_e4m3fn)),
    name_of_case);

// The update of the step before is hidden behind what follows, and so is the writing.
TEST(DeviceCheckpoint, IsOfOneInstantThoughStepsGoOn) {
  FSDP_REQUIRE_GPU();
  for (const double fraction : {0.0, 0.5}) {
    Training run = on_gpu();
    run.shard.offload.fraction = fraction;
    const WholeState at_five = run_training(run, [](TrainingRank& rank) { rank.train(0, 5); });
    const TempDir directory;
    run_training(run, [&](TrainingRank& rank) {
      Checkpointer checkpointer(directory.path(), rank.mesh, {.mode = SaveMode::kBackground});
      rank.train(0, 5);
      checkpointer.save(rank.state(), {.step = 5});
      rank.train(5, 25);
      checkpointer.wait();
    });
    expect_same_state(
        run_training(run,
                     [&](TrainingRank& rank) { load_checkpoint(directory.path(), rank.state()); }),
        at_five, concat("offload ", fraction));
  }
}

// A rank whose steps are replayed, each with random numbers in it.
struct ReplayedSteps {
  TrainingRank& rank;
  at::Tensor input = rank.input_of(0);
  at::Tensor noise = at::zeros({8}, rank.input_of(0).options());
  Graph graph{rank.sharded, &rank.optimizer, [this] {
                noise.copy_(at::rand({8}, noise.options()));
                rank.step(input);
              }};

  void run(int first_step, int last_step) {
    for (int number = first_step; number < last_step; ++number) {
      input.copy_(rank.input_of(number));
      graph.run();
    }
  }
};

TEST(DeviceCheckpoint, IsSavedAndLoadedBetweenReplays) {
  FSDP_REQUIRE_GPU();
  Training run = on_gpu(1);
  run.shard.collectives = Collectives::kAlways;
  const WholeState at_six = run_training(run, [](TrainingRank& rank) { rank.train(0, 6); });
  const WholeState at_ten = run_training(run, [](TrainingRank& rank) { rank.train(0, 10); });
  const TempDir directory;
  at::Tensor noise;
  const auto seeded = [](uint64_t seed) { torch::manual_seed(seed); };
  expect_same_state(run_training(run,
                                 [&](TrainingRank& rank) {
                                   seeded(11);
                                   ReplayedSteps steps{rank};
                                   Checkpointer checkpointer(directory.path(), rank.mesh,
                                                             {.mode = SaveMode::kBackground});
                                   steps.run(0, 6);
                                   ASSERT_TRUE(steps.graph.is_recorded());
                                   checkpointer.save(rank.state(), {.step = 6});
                                   steps.run(6, 10);  // while it is written
                                   checkpointer.wait();
                                   noise = steps.noise.cpu();
                                 }),
                    at_ten, "replayed to the end");
  expect_same_state(
      run_training(run,
                   [&](TrainingRank& rank) { load_checkpoint(directory.path(), rank.state()); }),
      at_six, "saved");
  expect_same_state(
      run_training(run,
                   [&](TrainingRank& rank) {
                     seeded(12);
                     ReplayedSteps steps{rank};
                     steps.run(20, 26);
                     ASSERT_TRUE(steps.graph.is_recorded());
                     EXPECT_TRUE(load_checkpoint(directory.path(), rank.state()).has_random_state);
                     steps.run(6, 10);
                     EXPECT_TRUE(at::equal(steps.noise.cpu(), noise));
                   }),
      at_ten, "loaded between replays");
}

}  // namespace
}  // namespace fsdp::testing::checkpoint_device_test
