// `fsdp plan` as users run it: its options, its tables, its JSON, and every wrong value.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "processes/plan_command.h"

namespace fsdp::cli_plan_test {
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

TEST(PlanCommand, CountsCodesAndScalesOfQuantisedWeights) {
  const auto gathered = [](const std::string& weights) {
    const Json plan = plan_json("--model llama3-8b --ranks 8 --weights " + weights);
    EXPECT_EQ(plan["weights"], weights);
    return plan["traffic_bytes"]["all_gather"].get<double>();
  };
  // Twice per step 7/8 of the matrices of 32 blocks; all else is gathered as in bf16.
  constexpr double kMatrices =
      2 * 7.0 / 8 * 32 * (4096.0 * (2 * 4096 + 2 * 1024) + 3 * 4096.0 * 14336);
  EXPECT_EQ(gathered("bf16") - gathered("fp8-row"), kMatrices);
  EXPECT_EQ(gathered("bf16") - gathered("mxfp8"), kMatrices * (1 - 1.0 / 32));
}

TEST(PlanCommand, HelpHasOptionsOfRunsAndItsOwn) {
  const CommandResult help = run_fsdp("plan --help");
  EXPECT_EQ(help.exit_code, 0);
  for (const char* word : {"--model", "--ranks", "--strategy", "--moments", "--budget", "--fit",
                           "--config", "--batch", "--weights", "--rates", "--link", "--timeline",
                           "--calibrate", "--json", "--compare", "Examples:", "deepseek-v3"})
    EXPECT_THAT(help.out, HasSubstr(word));
}

TEST(PlanCommand, TableNamesEveryKind) {
  const CommandResult result = run_fsdp("plan --model llama3-8b --ranks 8 --main-storage separate");
  EXPECT_EQ(result.exit_code, 0);
  for (const char* text : {"8,030,261,248 parameters in 34 units", "padding ", "weights ",
                           "main weights        3829 MiB   fp32, 1/8", "main gradients", "moments",
                           "weight pool", "gradient pool", "total", "all-gather", "reduce-scatter",
                           "all-reduce", "(n-1)/n", "planned in"})
    EXPECT_THAT(result.out, HasSubstr(text));
}

TEST(PlanCommand, TableSaysHowTheOptimizersStateIsStored) {
  const auto table = [](const std::string& more) {
    const CommandResult result = run_fsdp("plan --model llama3-8b --ranks 8 " + more);
    EXPECT_EQ(result.exit_code, 0) << result.err;
    return result.out;
  };
  EXPECT_THAT(table("--main-storage split"),
              AllOf(HasSubstr("main weights        1915 MiB   fp32 split: its lower half, 1/8"),
                    Not(HasSubstr("host"))));
  EXPECT_THAT(table("--moments fp8_e4m3"), HasSubstr("2 x fp8_e4m3 with scales, 1/8"));
  EXPECT_THAT(table("--moments bf16/fp32"), HasSubstr("bf16 + fp32, 1/8"));
  EXPECT_THAT(table("--moments fp32/none"), HasSubstr("3829 MiB   fp32, 1/8"));
  EXPECT_THAT(table("--main-storage split --offload 1"),
              AllOf(HasSubstr("device      host\n"),
                    HasSubstr("main weights             0 B  3829 MiB   fp32 split"),
                    HasSubstr("moments                  0 B  7658 MiB   2 x fp32"),
                    HasSubstr("weights             1915 MiB             bf16, 1/8")));
}

TEST(PlanCommand, AddsTheMostMemoryOfAStepWhenABatchIsGiven) {
  const std::string model = "plan --model llama-1b --ranks 1 --main-grads fp32 ";
  const CommandResult table = run_fsdp(model + "--batch 4 --sequence 2048");
  EXPECT_EQ(table.exit_code, 0) << table.err;
  for (const char* text : {"most memory of a step on a GPU, 4 x 2048 tokens: in the ",
                           "activations", "kept for the backward", "CUDA context"})
    EXPECT_THAT(table.out, HasSubstr(text));
  EXPECT_THAT(run_fsdp(model).out, Not(HasSubstr("most memory of a step")));

  const std::string batch = "--model llama-1b --ranks 1 --main-grads fp32 --batch 4 ";
  const Json kept = plan_json(batch + "--sequence 2048");
  const Json peak = kept.at("peak_bytes");
  int64_t sum = 0;
  for (const char* key : {"state", "gradients", "activations", "working", "workspaces", "rounding"})
    sum += peak.at(key).get<int64_t>();
  EXPECT_EQ(peak.at("allocated"), sum);
  EXPECT_EQ(peak.at("total"), sum + peak.at("context").get<int64_t>());
  EXPECT_EQ(peak.at("gradients"), kept.at("bytes").at("main_grad"));
  const Json step = plan_json(batch + "--sequence 2048 --gradient-lifetime step");
  EXPECT_LT(step.at("peak_bytes").at("allocated"), peak.at("allocated"));
  const Json chunks = plan_json(batch + "--sequence 2048 --logit-memory 128MiB");
  EXPECT_LT(chunks.at("peak_bytes").at("working"), peak.at("working"));
}

// Two hosts of eight; a gradient's sums leave a host once, in fp32.
// Between hosts only the rows of chosen experts travel, unless somebody asks for more.
TEST(PlanCommand, PadsNoExpertsBetweenHosts) {
  const std::string model = "--model mixtral-8x7b --ranks 16 --ep 8 --batch 32 --sequence 4096 ";
  const auto activations = [&](const std::string& options) {
    return plan_json(model + options)["peak_bytes"]["activations"].get<int64_t>();
  };
  const int64_t padded = activations("--expert-exchange padded");
  const int64_t exact = activations("--expert-exchange exact");
  EXPECT_LT(exact, padded);
  EXPECT_EQ(activations(""), padded);
  EXPECT_EQ(activations("--host-ranks 8"), padded);
  EXPECT_EQ(activations("--host-ranks 4"), exact);
  EXPECT_EQ(activations("--host-ranks 4 --expert-exchange padded"), padded);
}

TEST(PlanCommand, SaysWhatAStepCostsTheNetwork) {
  const std::string model = "plan --model llama3-8b --ranks 16 --grad-comm bf16 --host-ranks ";
  const CommandResult table = run_fsdp(model + "8");
  EXPECT_EQ(table.exit_code, 0) << table.err;
  for (const char* text : {"with 2 hosts; sums in groups of 8", "through a card", "launches",
                           "connections", "NCCL's memory about"})
    EXPECT_THAT(table.out, HasSubstr(text));
  const Json network = plan_json(model.substr(5) + "8").at("network");
  const Json reductions = network.at("reductions");
  EXPECT_GT(reductions.at("far_bytes"), reductions.at("ring_far_bytes"));
  EXPECT_LE(reductions.at("far_bytes").get<int64_t>(),
            2 * reductions.at("ring_far_bytes").get<int64_t>());
  const Json one_host = plan_json(model.substr(5) + "16").at("network");
  EXPECT_EQ(one_host.at("reductions").at("far_bytes"), 0);
  EXPECT_EQ(one_host.at("gathers").at("far_bytes"), 0);
  EXPECT_FALSE(plan_json("--model llama3-8b --ranks 16").contains("network"));
  EXPECT_THAT(run_fsdp(model + "3").err, HasSubstr("must divide ranks = 16"));
}

void expect_keys(const Json& plan) {
  for (const char* key : {"strategy", "parameters", "ranks", "units", "padding_fraction", "bytes",
                          "host_bytes", "traffic_bytes", "plan_seconds"})
    EXPECT_TRUE(plan.contains(key)) << key;
}

TEST(PlanCommand, JsonHasTheDocumentedKeys) {
  const Json plan = plan_json("--model llama3-8b --ranks 8 --main-storage separate");
  expect_keys(plan);
  EXPECT_EQ(plan.at("parameters"), 8030261248);
  EXPECT_EQ(plan.at("ranks"), 8);
  EXPECT_EQ(plan.at("units"), 34);
  EXPECT_EQ(plan.at("bytes").at("main_weight"), 4 * 8030261248 / 8);
}

TEST(PlanCommand, ReadsTheConfigOfADirectory) {
  const std::string folder = ::testing::TempDir() + "fsdp_plan_" + std::to_string(::getpid());
  std::filesystem::create_directory(folder);
  std::ofstream(folder + "/config.json") << R"({"model_type": "llama", "vocab_size": 512,
      "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
      "num_key_value_heads": 4, "intermediate_size": 128})";
  const Json plan = plan_json("--model " + folder + " --ranks 2");
  EXPECT_EQ(plan, [&] {
    Json of_file = plan_json("--model " + folder + "/config.json --ranks 2");
    of_file["plan_seconds"] = plan.at("plan_seconds");
    return of_file;
  }());
  EXPECT_EQ(plan.at("units"), 4);
  std::filesystem::remove_all(folder);
}

// Sequences of a step, of all ranks and microbatches, as `fsdp train` has them.
TEST(PlanCommand, BatchIsThatOfARun) {
  const auto peak = [](const std::string& more) {
    return plan_json("--model llama-1b --sequence 512 " + more).at("peak_bytes");
  };
  EXPECT_EQ(peak("--ranks 8 --batch 16").at("activations"),
            peak("--ranks 2 --batch 4").at("activations"));
  EXPECT_EQ(peak("--ranks 8 --batch 64 --microbatches 4"), peak("--ranks 8 --batch 16"));
  EXPECT_EQ(peak("--ranks 8 --tp 2 --batch 8").at("activations"),
            peak("--ranks 8 --tp 2 --batch 16 --microbatches 2").at("activations"));
}

TEST(PlanCommand, CompareIsAnArrayWithARowPerStrategy) {
  const Json flat = plan_json("--model llama-1b --ranks 8 --compare");
  ASSERT_EQ(flat.size(), 4u);
  const Json hybrid = plan_json("--model llama-1b --ranks 8 --outer 2 --compare");
  ASSERT_EQ(hybrid.size(), 7u);
  for (const Json& row : hybrid) expect_keys(row);
  EXPECT_EQ(hybrid.at(6).at("strategy"), "optim_grads_params+hfsdp");
  const CommandResult table = run_fsdp("plan --model llama-1b --ranks 8 --outer 2 --compare");
  EXPECT_THAT(table.out, AllOf(HasSubstr("no_shard "), HasSubstr("optim_grads_params+hfsdp ")));
}

TEST(PlanCommand, OptionsChangeWhatTheySay) {
  const auto bytes = [](const std::string& more, const char* kind) {
    return plan_json("--model llama-1b --ranks 4 " + more).at("bytes").at(kind).get<int64_t>();
  };
  EXPECT_EQ(bytes("--main-params none", "main_weight"), 0);
  EXPECT_EQ(bytes("--main-params bf16", "main_weight"), 0);
  EXPECT_EQ(bytes("--main-grads fp32", "main_grad"), 2 * bytes("", "main_grad"));
  EXPECT_EQ(bytes("--moments bf16", "moments") * 2, bytes("", "moments"));
  EXPECT_EQ(bytes("--moments bf16/none", "moments") * 4, bytes("", "moments"));
  EXPECT_EQ(bytes("--moments bf16/fp32", "moments") * 4, bytes("", "moments") * 3);
  EXPECT_EQ(bytes("--main-storage split", "main_weight") * 2,
            bytes("--main-storage separate", "main_weight"));
  EXPECT_EQ(bytes("--offload 0.5", "moments") * 2, bytes("", "moments"));
  // A bit for every weight, where two moments have 64.
  EXPECT_EQ((bytes("--patches p", "moments") - bytes("", "moments")) * 64, bytes("", "moments"));
  const Json offloaded = plan_json("--model llama-1b --ranks 4 --main-storage split --offload 1");
  EXPECT_EQ(offloaded.at("offload"), 1.0);
  EXPECT_EQ(offloaded.at("host_bytes").at("moments"), bytes("", "moments"));
  EXPECT_EQ(offloaded.at("host_bytes").at("main_weight"),
            bytes("--main-storage separate", "main_weight"));
  EXPECT_EQ(bytes("--strategy no_shard", "weight_pool"), 0);
  EXPECT_EQ(bytes("--strategy no_shard --main-grads fp32 --grad-comm bf16", "grad_pool"),
            2 * (32000 * 2048 + 2048));  // the largest unit: final norm and head
  EXPECT_GT(bytes("--prefetch 3", "weight_pool"), bytes("--prefetch 1", "weight_pool"));
  EXPECT_GT(bytes("--pool max_pool", "weight_pool"), bytes("--pool planned", "weight_pool"));
  EXPECT_GT(bytes("--granularity tensor", "weight"), bytes("--granularity 'block(128)'", "weight"));
  EXPECT_EQ(bytes("--compute fp32", "weight"), 2 * bytes("", "weight"));
  EXPECT_EQ(plan_json("--model llama-1b --ranks 4 --pool-budget 1GiB").at("pool"), "planned");
  EXPECT_GT(plan_json("--model llama-1b --ranks 4 --pool-budget 1GiB").at("prefetch"), 1);
}

TEST(PlanCommand, SaysWhoOwnsMatricesOfMuon) {
  const Json muon = plan_json("--model llama-1b --ranks 256 --optimizer muon");
  EXPECT_EQ(muon.at("muon").at("matrices"), 22 * 7);
  EXPECT_GT(muon.at("muon").at("idle_ranks"), 256 - 22 * 7 - 1);
  EXPECT_GT(muon.at("bytes").at("workspace"), 0);
  const CommandResult table = run_fsdp("plan --model llama-1b --ranks 8 --optimizer muon");
  EXPECT_THAT(table.out, HasSubstr("muon      154 matrices with an owner each; the busiest rank"));
  EXPECT_THAT(table.out, HasSubstr("Muon's products in bf16"));
  EXPECT_THAT(table.out, HasSubstr("fp32 of matrices, two of the rest, 1/8"));
  EXPECT_FALSE(plan_json("--model llama-1b --ranks 8").contains("muon"));
}

TEST(PlanCommand, AnswersEveryWrongValueWithOneSentence) {
  expect_refused(
      "",
      {
          {"", "--model is missing; give a JSON file or one of llama3-8b"},
          {"--model llama-1b", "--ranks is missing; give the number of ranks"},
          {"--model lama-1b --ranks 8",
           "model is 'lama-1b', which is not known; did you mean 'llama-1b'?"},
          {"--model nothing.json --ranks 8",
           "model is 'nothing.json', but there is no file 'nothing.json'"},
          {"--model /tmp --ranks 8", "model is '/tmp', but there is no file '/tmp/config.json'"},
          {"--model llama-1b --ranks 0", "--ranks is '0'; it must be a whole number from 1"},
          {"--model llama-1b --ranks", "--ranks has no value; give one"},
          {"--model llama-1b --rnaks 8",
           "option '--rnaks' is not known to fsdp plan; did you mean '--ranks'?"},
          {"--model mixtral-8x7b --ranks 8 --ep 2 --expert-parameters '*.expert.*'",
           "expert_parameters has '*.expert.*', which matches no tensor of 'mixtral-8x7b'; did you "
           "mean 'model.layers."},
          {"--model mixtral-8x7b --ranks 8 --ep 3",
           "ep is 3 on 8 ranks = 1 outer x 8 inner; it must divide 8"},
          {"--model mixtral-8x7b --ranks 16 --ep 16",
           "'model.layers.0.block_sparse_moe.experts.gate_up_proj' has 8 experts; ep must divide"},
          {"--model nemotron-h-8b --ranks 16 --tp 16",
           "tp is 16, but 'backbone.layers.0.mixer.A_log' has 8 parts that are not cut"},
          {"--model deepseek-v3 --ranks 8 --batch 1 --sequence 4",
           "--batch is 1, which 8 ranks with 1 microbatch cannot share evenly; give a multiple of "
           "8, e.g. 8"},
          {"--model llama-1b --fit 80GiB --outer 4 --tp 2 --batch 3 --sequence 4",
           "--batch is 3, which 4 tp groups with 1 microbatch cannot share evenly"},
      });
  expect_refused(
      "--model llama-1b --ranks 8",
      {
          {"9", "argument '9' is not known to fsdp plan"},
          {"--outer 3", "outer is 3; it must divide ranks = 8"},
          {"--ep 2", "ep is 2, but model 'llama-1b' has no experts"},
          {"--expert-parameters '*.q_proj.weight'",
           "the ranks of a tp group cut it, and it can be cut over one of ep and tp"},
          {"--tp 8",
           "tp is 8, but 'model.layers.0.self_attn.k_proj.weight' has 4 parts that are not cut"},
          {"--strategy optm", "strategy 'optm' is unknown; did you mean 'optim'?"},
          {"--strategy optim+hfsdp", "which shards the outer axis, but outer is 1; set outer"},
          {"--main-params fp31", "--main-params is 'fp31'; did you mean"},
          {"--moments fp12/fp32", "--moments is 'fp12'; did you mean"},
          {"--moments fp32/fp64", "second_moment is fp64; it must be fp32, bf16"},
          {"--moments none/fp32",
           "second_moment is fp32, but first_moment is none; AdamW has both"},
          {"--batch 4", "--sequence is missing; the peak of a step needs both"},
          {"--sequence 4", "--batch is missing; the peak of a step needs both"},
          {"--batch 8 --sequence 4 --compare",
           "--batch is '8', but --compare has no column for peaks"},
          {"--gradient-lifetime step",
           "--gradient-lifetime is 'step', which matters for the peak of a step alone"},
          {"--offload 1.5", "--offload is '1.5'; it must be a number from"},
          {"--granularity 'block(0)'", "use element, row, block(n) with n >= 1"},
          {"--compare --strategy optim", "--compare shows every strategy; drop one"},
          {"--weights fp8row", "--weights is 'fp8row'; did you mean 'fp8-row'?"},
          {"--weights fp8-row --weights-except '*.qproj.*'",
           "weights_except has '*.qproj.*', which matches no tensor"},
          {"--weights fp8-row --main-params none",
           "weights is fp8-row, for which main weights are fp32, but main_params is none"},
      });
  expect_refused("--model llama-1b --ranks 8 --optimizer muon",
                 {
                     {"--offload 0.5",
                      "muon updates whole matrices, but offload is 0.5, which cuts shards "
                      "anywhere; set it to 0"},
                     {"--tp 2", "muon updates whole matrices, which tp = 2 ranks share out"},
                 });
  const TextFile file(
      "model.json", R"({"units": [{"name": "a", "tensors": [{"name": "w", "shape": [8, 16]}]}]})");
  expect_refused("--ranks 8 --model " + file.path(),
                 {
                     {"--optimizer muon",
                      "names no matrix of a linear layer or of experts; choose another optimizer"},
                 });
}

TEST(PlanCommand, TakesTheNamesOfExpertsThatAListCannotSay) {
  const TextFile list("list.json", R"({"name": "mine", "units": [{"name": "block", "tensors": [
      {"name": "block.experts.up", "shape": [8, 64, 32]}, {"name": "block.norm", "shape": [64]},
      {"name": "block.experts.down", "shape": [8, 32, 64]}, {"name": "scale", "shape": []}]}]})");
  const std::string model = "--model " + list.path() + " --ranks 8 ";
  const Json gathered = plan_json(model);
  const Json owned = plan_json(model +
                               "--ep 8 --expert-parameters '*.up' --expert-parameters "
                               "'*.down'");
  EXPECT_EQ(owned.at("bytes").at("weight"), gathered.at("bytes").at("weight"));
  const auto received = [](const Json& plan) { return plan.at("traffic_bytes").at("total"); };
  EXPECT_LT(received(owned).get<int64_t>(), received(gathered).get<int64_t>() / 50);
  // Two slices of 7 each: what the ranks cannot share is said with its numbers.
  const TextFile odd("odd.json", R"({"name": "odd", "units": [{"name": "block", "tensors": [
      {"name": "block.experts", "shape": [14, 4]}]}]})");
  test::expect_only_error(
      run_fsdp("plan --ranks 4 --ep 4 --expert-parameters '*.experts' --model " + odd.path()), 2,
      "ep is 4, but 'block.experts' has 14 experts; ep must divide their number");
  test::expect_only_error(
      run_fsdp("plan --ranks 4 --expert-parameters scale --model " + list.path()), 2,
      "expert_parameters has 'scale', which matches 'scale' of shape []; experts need a first "
      "dimension");
  // Names of experts that the model knows already change nothing.
  const std::string known = "--model mixtral-8x7b --ranks 8 --ep 4";
  EXPECT_EQ(plan_json(known).at("bytes"),
            plan_json(known + " --expert-parameters '*.experts.*'").at("bytes"));
}

}  // namespace
}  // namespace fsdp::cli_plan_test
