// Checkpoints of a training, through the commands and back into trainings.
#include <gmock/gmock.h>

#include "processes/run_command.h"
#include "support/checkpoint_training.h"

namespace fsdp::testing::cli_trained_test {
namespace {

using test::CommandResult;
using test::run_fsdp;
using ::testing::HasSubstr;

class TrainedCheckpoint : public ::testing::Test {
 protected:
  TrainedCheckpoint() {
    Training run{.ranks = 3};
    run.shard.strategy = parse_strategy("optim_grads_params");
    saved_ = run_training(run, [&](TrainingRank& rank) {
      rank.train(0, 3);
      save_checkpoint(this->run_, rank.state(), {.step = 3, .schedule = "warm"});
    });
  }

  static void run_command(const std::string& arguments) {
    const CommandResult result = run_fsdp(arguments);
    ASSERT_EQ(result.exit_code, 0) << result.err;
  }

  TempDir directory_;
  std::string run_ = directory_ / "run";
  std::string out_ = directory_ / "out";
  WholeState saved_;
};

TEST_F(TrainedCheckpoint, IsShownAndVerified) {
  const CommandResult result = run_fsdp("inspect " + run_ + " --verify --stats");
  EXPECT_EQ(result.exit_code, 0) << result.err;
  for (const char* text : {"step        3\n", "ranks       3\n", "strategy    optim_grads_params",
                           "schedule    warm\n", "AdamW after 3 steps",
                           "every byte is what was written", "unit0.linear.weight.exp_avg_sq"})
    EXPECT_THAT(result.out, HasSubstr(text));
}

TEST_F(TrainedCheckpoint, ItsWeightsArriveThroughHuggingFacesFiles) {
  run_command("convert " + run_ + " " + out_ + " --to hf --max-shard-size 300");
  Training other{.ranks = 2};
  WholeState loaded = run_training(other, [&](TrainingRank& rank) {
    load_checkpoint(out_, {.sharded = rank.sharded});  // weights alone
  });
  for (const auto& [name, value] : saved_) {
    const bool is_weight = name.ends_with("weight") || name.ends_with("bias");
    EXPECT_EQ(at::equal(loaded.at(name), value), is_weight) << name;
  }
}

TEST_F(TrainedCheckpoint, CutAnewItGoesOnWhereItWas) {
  run_command("convert " + run_ + " " + out_ + " --to sharded --ranks 5");
  Training other{.ranks = 2};
  const WholeState loaded = run_training(other, [&](TrainingRank& rank) {
    const LoadedCheckpoint checkpoint = load_checkpoint(out_, rank.state());
    EXPECT_EQ(checkpoint.step, 3);
    EXPECT_EQ(checkpoint.schedule, "warm");
    EXPECT_EQ(rank.optimizer.state().step, 3);
  });
  expect_same_state(loaded, saved_, "cut anew");
  run_command("inspect " + run_ + " --diff " + out_);
}

}  // namespace
}  // namespace fsdp::testing::cli_trained_test
