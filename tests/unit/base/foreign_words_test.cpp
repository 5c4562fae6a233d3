// Words of other programs are answered with ours.
#include "fsdp/base/foreign_words.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace fsdp::foreign_words_test {
namespace {

const std::vector<std::string> kOptions = {"--lr", "--compute", "--batch", "--steps", "--ranks"};
const std::vector<std::string> kKeys = {"lr", "compute", "weight_decay", "checkpoint_dir"};
const std::vector<std::string> kStrategies = {"no_shard", "optim", "optim_grads",
                                              "optim_grads_params"};

TEST(ForeignWords, AreAnsweredInTheFormOfTheCandidates) {
  EXPECT_EQ(meant_text("--learning-rate", kOptions), "did you mean '--lr'? ");
  EXPECT_EQ(meant_text("learning_rate", kKeys), "did you mean 'lr'? ");
  EXPECT_EQ(meant_text("output_dir", kKeys), "did you mean 'checkpoint_dir'? ");
  EXPECT_EQ(meant_text("ZeRO-3", kStrategies), "did you mean 'optim_grads_params'? ");
  EXPECT_EQ(meant_text("zero1", kStrategies), "did you mean 'optim'? ");
}

TEST(ForeignWords, ThatAreNamesOfAValueStandForIt) {
  EXPECT_EQ(same_value("ZeRO-3", kStrategies), "optim_grads_params");
  EXPECT_EQ(same_value("hsdp", kStrategies), "optim_grads_params");
  EXPECT_EQ(same_value("zero1", kStrategies), "optim");
  EXPECT_EQ(same_value("hfsdp", kStrategies), "");
  // A value or a difference goes with these.
  EXPECT_EQ(same_value("--bf16", kOptions), "");
  EXPECT_EQ(same_value("--batch-size", kOptions), "");
}

TEST(ForeignWords, BringTheValueAndTheDifference) {
  EXPECT_EQ(meant_text("--bf16", kOptions), "did you mean '--compute bf16'? ");
  EXPECT_EQ(meant_text("bf16", kKeys), "did you mean \"compute\": \"bf16\"? ");
  EXPECT_EQ(meant_text("--per-device-train-batch-size", kOptions),
            "did you mean '--batch' (sequences of all ranks and microbatches together)? ");
}

TEST(ForeignWords, HaveTheFirstRowThatIsKnown) {
  EXPECT_EQ(meant_text("--num-train-epochs", kOptions),
            "did you mean '--steps' (or --tokens; an epoch is the data's tokens once)? ");
  const std::vector<std::string> newer = {"--steps", "--epochs"};
  EXPECT_EQ(meant_text("--num-train-epochs", newer), "did you mean '--epochs'? ");
  // One word is an option's name, and a value.
  const std::vector<std::string> option = {"--strategy"};
  EXPECT_EQ(meant_text("--fsdp", option), "did you mean '--strategy optim_grads_params'? ");
  EXPECT_EQ(meant_text("fsdp", kStrategies), "did you mean 'optim_grads_params'? ");
}

TEST(ForeignWords, AreAnsweredWithWhatIsAlwaysSo) {
  const std::vector<std::string> option = {"--prefetch"};
  EXPECT_EQ(meant_text("--overlap-grad-reduce", option),
            "reductions always run beside the backward, so leave it out. ");
  const std::vector<std::string> key = {"prefetch"};
  EXPECT_EQ(meant_text("overlap_grad_reduce", key),
            "reductions always run beside the backward, so leave it out. ");
  EXPECT_EQ(meant_text("--overlap-grad-reduce", kOptions), "");
}

TEST(ForeignWords, OthersAreAnsweredByTheirSpelling) {
  EXPECT_EQ(meant_text("--rnaks", kOptions), "did you mean '--ranks'? ");
  EXPECT_EQ(meant_text("--zzzzzzzzz", kOptions), "");
  EXPECT_EQ(meant_text("", kStrategies), "");
  // Without an option of that name, the word of others does not help.
  EXPECT_EQ(meant_text("--max-grad-norm", kOptions), "");
}

}  // namespace
}  // namespace fsdp::foreign_words_test
