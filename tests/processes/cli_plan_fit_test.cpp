// `fsdp plan` for a cluster: what fits a rank's memory, on how many ranks, with the settings of a
// run.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <set>
#include <string>

#include "fsdp/base/text.h"
#include "processes/plan_command.h"

namespace fsdp::cli_plan_fit_test {
namespace {

using test::CommandResult;
using test::expect_refused;
using test::plan_json;
using test::run_fsdp;
using test::TextFile;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;
using Json = nlohmann::json;

TEST(PlanForACluster, ABudgetIsTheWholeMemoryOfARank) {
  const std::string model = "--model llama3-70b --ranks 64 --main-grads fp32 ";
  const int64_t gib = int64_t{1} << 30;
  const Json plain = plan_json(model);
  const Json deep = plan_json(model + "--budget 40GiB");
  EXPECT_GT(deep.at("prefetch"), plain.at("prefetch"));
  EXPECT_LE(deep.at("bytes").at("total").get<int64_t>(), 40 * gib);
  const Json deeper =
      plan_json(model + "--prefetch " + std::to_string(deep.at("prefetch").get<int64_t>() + 1));
  EXPECT_GT(deeper.at("bytes").at("total").get<int64_t>(), 40 * gib);
  // With a batch, activations and what libtorch takes are part of it.
  const Json batch =
      plan_json(model + "--budget 80GiB --batch 64 --sequence 4096 --recompute block");
  EXPECT_LE(batch.at("peak_bytes").at("total").get<int64_t>(), 80 * gib);
  test::expect_only_error(run_fsdp("plan " + model + "--budget 10GiB"), 1,
                          "--budget is '10GiB', but a rank needs ");
  test::expect_only_error(run_fsdp("plan --model llama3-8b --ranks 8 --budget 20GiB --batch 64 "
                                   "--sequence 8192"),
                          1, "fsdp plan --fit 20GiB says on how many ranks it fits");
  test::expect_only_error(
      run_fsdp("plan --model llama3-8b --ranks 8 --budget 80GiB --batch 16 --sequence 8192"), 1,
      " GiB with --recompute block); give more memory, or more ranks");
}

TEST(PlanForACluster, RecomputedBlocksKeepTheirInputs) {
  const std::string batch = "--model llama-1b --ranks 1 --batch 4 --sequence 2048 ";
  const Json kept = plan_json(batch);
  const Json again = plan_json(batch + "--recompute block");
  EXPECT_EQ(kept.at("recompute"), "none");
  EXPECT_EQ(again.at("recompute"), "block");
  EXPECT_LT(again.at("peak_bytes").at("activations").get<int64_t>() * 4,
            kept.at("peak_bytes").at("activations").get<int64_t>());
  EXPECT_THAT(run_fsdp("plan " + batch + "--recompute block").out,
              HasSubstr("4 x 2048 tokens, blocks computed again: in "));
}

TEST(PlanForACluster, SaysWhatRecomputationWouldBring) {
  const std::string batch = "--model llama-1b --ranks 2 --batch 8 --sequence 2048 ";
  const int64_t brought = plan_json(batch + "--recompute block").at("peak_bytes").at("total");
  EXPECT_EQ(plan_json(batch).at("recomputed_bytes"), brought);
  EXPECT_THAT(run_fsdp("plan " + batch).out,
              HasSubstr("\nwith --recompute block " + bytes_text(brought)));
  // Nobody is told what somebody said, and nothing where it is too little.
  EXPECT_FALSE(plan_json(batch + "--recompute none").contains("recomputed_bytes"));
  EXPECT_FALSE(
      plan_json("--model llama-1b --ranks 2 --batch 2 --sequence 16").contains("recomputed_bytes"));
}

TEST(PlanForACluster, FindsTheLargestBatch) {
  const std::string model = "--model llama-1b --ranks 8 --tp 2 --microbatches 2 --sequence 2048 ";
  const Json found = plan_json(model + "--largest-batch --budget 40GiB");
  const int64_t batch = found.at("batch");
  constexpr int64_t kParts = 4 * 2;  // groups of two ranks, microbatches
  EXPECT_EQ(batch % kParts, 0);
  const auto needs = [&](int64_t sequences) -> int64_t {
    return plan_json(model + "--batch " + std::to_string(sequences)).at("peak_bytes").at("total");
  };
  EXPECT_EQ(needs(batch), found.at("peak_bytes").at("total"));
  EXPECT_LE(needs(batch), int64_t{40} << 30);
  EXPECT_GT(needs(batch + kParts), int64_t{40} << 30);
  EXPECT_THAT(run_fsdp("plan " + model + "--largest-batch --budget 40GiB").out,
              HasSubstr("largest batch within 40GiB: " + std::to_string(batch) +
                        " sequences of 8 ranks and 2 microbatches\n"));
  test::expect_only_error(run_fsdp("plan " + model + "--largest-batch --budget 4GiB"), 1,
                          "--budget is 4096 MiB, but with one sequence at a time a rank needs ");
}

TEST(PlanForACluster, AdvisesNothingThatWasGiven) {
  const auto refused = [](const std::string& more) {
    return run_fsdp("plan --model mixtral-8x7b --fit 5GiB --batch 64 --sequence 4096 " + more).err;
  };
  EXPECT_THAT(refused(""), AllOf(HasSubstr("--tp (ranks share"), HasSubstr("--ep (ranks share"),
                                 HasSubstr("or --prefetch 0"), Not(HasSubstr("more ranks"))));
  EXPECT_THAT(
      refused("--tp 8 --ep 8 --prefetch 0 --microbatches 1 --ranks 64 --expert-exchange padded"),
      AllOf(HasSubstr("give more memory, or more ranks, or --offload 1.\n"), Not(HasSubstr("--tp")),
            Not(HasSubstr("--ep"))));
}

TEST(PlanForACluster, TakesTheSettingsOfARun) {
  const TextFile run("run.json", R"({"model": "llama-1b", "ranks": 8, "batch": 64, "sequence": 512,
      "microbatches": 2, "strategy": "optim", "main_grads": "fp32", "optimizer": "sgd", "lr": 0.1,
      "recompute": "block", "gradient_lifetime": "step", "data": ["text.bin"]})");
  const std::string config = "--config " + run.path() + " ";
  const std::string same =
      "--model llama-1b --ranks 8 --strategy optim --main-grads fp32 --moments fp32/none "
      "--recompute block --gradient-lifetime step --sequence 512 ";
  const Json planned = plan_json(config);
  for (const char* key : {"bytes", "traffic_bytes", "peak_bytes", "model", "ranks"})
    EXPECT_EQ(planned.at(key), plan_json(same + "--batch 64 --microbatches 2").at(key)) << key;
  // Flags win; more ranks share the same sequences.
  const Json more = plan_json(config + "--ranks 16 --strategy optim_grads");
  EXPECT_EQ(more.at("strategy"), "optim_grads");
  EXPECT_EQ(more.at("peak_bytes"),
            plan_json("--model llama-1b --ranks 16 --strategy optim_grads --main-grads fp32 "
                      "--moments fp32/none --recompute block --gradient-lifetime step "
                      "--sequence 512 --batch 64 --microbatches 2")
                .at("peak_bytes"));
  test::expect_only_error(run_fsdp("plan " + config + "--ranks 64"), 2,
                          "--batch is 64, which 64 ranks with 2 microbatches cannot share evenly");
  const TextFile tuned("tuned.json", R"({"model": "llama-1b", "init": "weights", "ranks": 8})");
  for (const std::string& open :
       {std::string("--model llama-1b --ranks 8 --batch 8 --sequence auto"),
        "--config " + tuned.path()})
    test::expect_only_error(run_fsdp("plan " + open), 2,
                            "--sequence is 'auto', which only a run with its data can answer");
  const TextFile wrong("wrong_run.json", R"({"model": "llama-1b", "learning_rate": 0.1})");
  test::expect_only_error(run_fsdp("plan --ranks 8 --config " + wrong.path()), 2,
                          "'learning_rate' is no setting; did you mean 'lr'?");
}

TEST(PlanForACluster, SaysWhatFits) {
  const Json rows = plan_json("--model llama3-8b --fit 80GiB --batch 64 --sequence 4096");
  ASSERT_GT(rows.size(), 3u);
  std::set<int64_t> ranks;
  for (size_t i = 0; i < rows.size(); ++i) {
    ranks.insert(rows[i].at("ranks").get<int64_t>());
    EXPECT_LE(rows[i].at("peak_bytes").at("total").get<int64_t>(), int64_t{80} << 30);
    if (i == 0 || rows[i].at("ranks") != rows[i - 1].at("ranks")) continue;
    EXPECT_GE(rows[i].at("traffic_bytes").at("total").get<int64_t>(),
              rows[i - 1].at("traffic_bytes").at("total").get<int64_t>());
  }
  EXPECT_EQ(ranks.size(), 3u);
  // Half as many ranks do not fit anything.
  const int64_t fewest = *ranks.begin();
  ASSERT_GT(fewest, 1);
  test::expect_only_error(run_fsdp("plan --model llama3-8b --fit 80GiB --batch 64 --sequence 4096 "
                                   "--ranks " +
                                   std::to_string(fewest / 2)),
                          1, "each needs at least ");
  // Recomputation is for what does not fit otherwise, such as long sequences.
  for (const Json& row : plan_json("--model llama-1b --fit 100GiB --batch 4 --sequence 4096"))
    EXPECT_EQ(row.at("recompute"), "none");
  const Json longer =
      plan_json("--model llama3-8b --fit 40GiB --batch 64 --sequence 32768 --ranks 64");
  for (const Json& row : longer) EXPECT_EQ(row.at("recompute"), "block");
  ASSERT_FALSE(longer.empty());
  test::expect_only_error(run_fsdp("plan --model llama3-8b --fit 40GiB --batch 64 --sequence 32768 "
                                   "--ranks 64 --recompute none"),
                          1, "each needs at least ");
  const CommandResult table = run_fsdp("plan --model llama3-8b --fit 80GiB");
  EXPECT_THAT(table.out, AllOf(HasSubstr("fits      80.0 GiB of each rank, without activations"),
                               HasSubstr("ranks  strategy"), HasSubstr("optim_grads_params")));
}

TEST(PlanForACluster, AnswersWrongBudgetsAndWordsOfOthersWithOneSentence) {
  expect_refused(
      "", {
              {"--model llama-1b --fit 1GiB --strategy optim", "but --fit tries every strategy"},
              {"--model llama-1b --fit much", "--fit is 'much'; it must be a size above 0"},
              {"--config '' --ranks 8", "--model is missing"},
              {"--model llama-1b --world-size 8", "did you mean '--ranks'?"},
          });
  expect_refused(
      "--model llama-1b --ranks 8",
      {
          {"--budget plenty", "--budget is 'plenty'; it must be a size above 0"},
          {"--budget 0GiB", "--budget is '0GiB'; it must be a size above 0"},
          {"--pool-budget 1MiB", "too small for the planned pool"},
          {"--pool-budget 1GiB --pool max_pool", "but the pool is max_pool; only the planned"},
          {"--budget 1GiB --prefetch 2",
           "--prefetch is '2', but --budget chooses the depth itself"},
          {"--pool-budget 1GiB --prefetch 2", "--pool-budget chooses the depth itself"},
          {"--pool-budget 1GiB --budget 9GiB",
           "--pool-budget is '1GiB', but --budget leaves the pool what the rest does not need"},
          {"--fit 1GiB --budget 9GiB", "--budget is '9GiB', but --fit is"},
          {"--compute bf61", "--compute is 'bf61'; did you mean 'bf16'?"},
          {"--recompute block",
           "--recompute is 'block', which matters for the peak of a step alone"},
          {"--largest-batch --sequence 128",
           "--largest-batch needs the memory of a rank; give --budget, too"},
          {"--largest-batch --budget 40GiB", "--sequence is missing; the peak of a step needs"},
          {"--largest-batch --budget 40GiB --batch 8 --sequence 128",
           "--batch is '8', but --largest-batch finds it; drop one of the two"},
          {"--strategy optim_grad",
           "strategy 'optim_grad' is unknown; did you mean 'optim_grads'?"},
          {"--activation-checkpointing", "did you mean '--recompute block'?"},
      });
}

}  // namespace
}  // namespace fsdp::cli_plan_fit_test
