// `fsdp plan` as users run it: its options, its tables, its JSON, and every wrong value.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "processes/plan_command.h"

namespace fsdp::cli_plan_test {
namespace {

using test::BadUse;
using test::CommandResult;
using test::expect_refused;
using test::plan_json;
using test::run_fsdp;
using test::TextFile;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::StartsWith;
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
  EXPECT_EQ(gathered("bf16") - gathered("nvfp4"), kMatrices * (1.5 - 1.0 / 16));
}

TEST(PlanCommand, HelpListsEveryOption) {
  const CommandResult help = run_fsdp("plan --help");
  EXPECT_EQ(help.exit_code, 0);
  for (const char* option : {"--model",
                             "--ranks",
                             "--outer",
                             "--ep",
                             "--tp",
                             "--expert-parameters",
                             "--strategy",
                             "--main-params",
                             "--main-storage",
                             "--main-grads",
                             "--grad-comm",
                             "--moments",
                             "--first-moment",
                             "--second-moment",
                             "--offload",
                             "--patches",
                             "--pool",
                             "--prefetch",
                             "--pool-budget",
                             "--other-units",
                             "--budget",
                             "--fit",
                             "--config",
                             "--compute",
                             "--expert-capacity",
                             "--recompute",
                             "--granularity",
                             "--batch",
                             "--sequence",
                             "--gradient-lifetime",
                             "--logit-memory",
                             "--weights",
                             "--weights-except",
                             "--weights-scaling",
                             "--optimizer",
                             "--microbatches",
                             "--cuda-graph",
                             "--rates",
                             "--link",
                             "--outer-link",
                             "--group-link",
                             "--link-latency",
                             "--timeline",
                             "--picture",
                             "--calibrate",
                             "--device",
                             "--threads",
                             "--json",
                             "--compare",
                             "Examples:",
                             "deepseek-v3"})
    EXPECT_THAT(help.out, HasSubstr(option));
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
  EXPECT_THAT(table("--first-moment bf16"), HasSubstr("bf16 + fp32, 1/8"));
  EXPECT_THAT(table("--second-moment none"), HasSubstr("3829 MiB   fp32, 1/8"));
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

void expect_keys(const Json& plan) {
  for (const char* key : {"strategy", "parameters", "ranks", "units", "padding_fraction", "bytes",
                          "host_bytes", "traffic_bytes", "plan_seconds"})
    EXPECT_TRUE(plan.contains(key)) << key;
  const Json& bytes = plan.at("bytes");
  int64_t sum = 0;
  for (const char* key :
       {"weight", "main_weight", "main_grad", "moments", "weight_pool", "grad_pool"})
    sum += bytes.at(key).get<int64_t>();
  EXPECT_EQ(bytes.at("total"), sum);
  const Json& host = plan.at("host_bytes");
  EXPECT_EQ(host.at("total").get<int64_t>(),
            host.at("main_weight").get<int64_t>() + host.at("moments").get<int64_t>());
  const Json& moved = plan.at("traffic_bytes");
  EXPECT_EQ(moved.at("total").get<int64_t>(), moved.at("all_gather").get<int64_t>() +
                                                  moved.at("reduce_scatter").get<int64_t>() +
                                                  moved.at("all_reduce").get<int64_t>());
}

TEST(PlanCommand, JsonHasTheDocumentedKeys) {
  const Json plan = plan_json("--model llama3-8b --ranks 8 --main-storage separate");
  expect_keys(plan);
  EXPECT_EQ(plan.at("parameters"), 8030261248);
  EXPECT_EQ(plan.at("ranks"), 8);
  EXPECT_EQ(plan.at("units"), 34);
  EXPECT_EQ(plan.at("bytes").at("main_weight"), 4 * 8030261248 / 8);
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
  EXPECT_EQ(bytes("--first-moment bf16 --second-moment none", "moments") * 4, bytes("", "moments"));
  EXPECT_EQ(bytes("--moments bf16 --second-moment fp32", "moments") * 4, bytes("", "moments") * 3);
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

TEST(PlanCommand, ReadsModelFiles) {
  const TextFile file(
      "model.json", R"({"units": [{"name": "a", "tensors": [{"name": "w", "shape": [8, 16]}]}]})");
  EXPECT_EQ(plan_json("--model " + file.path() + " --ranks 2").at("parameters"), 128);
}

TEST(PlanCommand, AnswersEveryWrongValueWithOneSentence) {
  const std::vector<BadUse> table = {
      {"", "--model is missing; give a JSON file or one of llama3-8b"},
      {"--model llama-1b", "--ranks is missing; give the number of ranks"},
      {"--model lama-1b --ranks 8",
       "model is 'lama-1b', which is not known; did you mean 'llama-1b'?"},
      {"--model nothing.json --ranks 8", "model is 'nothing.json', which is not a file"},
      {"--model llama-1b --ranks 0", "--ranks is '0'; it must be a whole number from 1"},
      {"--model llama-1b --ranks -4", "--ranks is '-4'; it must be a whole number from 1"},
      {"--model llama-1b --ranks eight", "--ranks is 'eight'; it must be a whole number"},
      {"--model llama-1b --ranks 8.0", "--ranks is '8.0'; it must be a whole number"},
      {"--model llama-1b --ranks", "--ranks has no value; give one"},
      {"--model llama-1b --ranks 8 --ranks 9", "--ranks was given more than once; give it once"},
      {"--model llama-1b --ranks 8 info", "argument 'info' is not known to fsdp plan"},
      {"--model llama-1b --rnaks 8",
       "option '--rnaks' is not known to fsdp plan; did you mean '--ranks'?"},
      {"--model llama-1b --ranks 8 9", "argument '9' is not known to fsdp plan"},
      {"--model llama-1b --ranks 8 --outer 3", "outer is 3; it must divide ranks = 8"},
      {"--model llama-1b --ranks 8 --outer 0", "--outer is '0'; it must be a whole number from 1"},
      {"--model llama-1b --ranks 8 --ep 2", "ep is 2, but model 'llama-1b' has no experts"},
      {"--model mixtral-8x7b --ranks 8 --ep 2 --expert-parameters '*.expert.*'",
       "expert_parameters has '*.expert.*', which matches no tensor of 'mixtral-8x7b'; did you "
       "mean 'model.layers."},
      {"--model llama-1b --ranks 8 --expert-parameters '*.q_proj.weight'",
       "the ranks of a tp group cut it, and it can be cut over one of ep and tp"},
      {"--model mixtral-8x7b --ranks 8 --ep 3",
       "ep is 3 on 8 ranks = 1 outer x 8 inner; it must divide 8"},
      {"--model mixtral-8x7b --ranks 16 --ep 16",
       "'model.layers.0.block_sparse_moe.experts.gate_up_proj' has 8 experts; ep must divide"},
      {"--model llama-1b --ranks 8 --tp 3",
       "tp is 3 on 8 ranks = 1 outer x 8 inner; it must divide 8"},
      {"--model llama-1b --ranks 8 --tp 8",
       "tp is 8, but 'model.layers.0.self_attn.k_proj.weight' has 4 parts that are not cut"},
      {"--model nemotron-h-8b --ranks 16 --tp 16",
       "tp is 16, but 'backbone.layers.0.mixer.A_log' has 8 parts that are not cut"},
      {"--model llama-1b --ranks 8 --strategy optm",
       "strategy 'optm' is unknown; did you mean 'optim'?"},
      {"--model llama-1b --ranks 8 --strategy no_shard+hfsdp --outer 2",
       "shard the inner axis too"},
      {"--model llama-1b --ranks 8 --strategy RS/RS/RS", "has a replicated axis"},
      {"--model llama-1b --ranks 8 --strategy optim+hfsdp",
       "which shards the outer axis, but outer is 1; set outer"},
      {"--model llama-1b --ranks 8 --main-params fp31", "--main-params is 'fp31'; did you mean"},
      {"--model llama-1b --ranks 8 --main-grads float", "--main-grads is 'float'; "},
      {"--model llama-1b --ranks 8 --grad-comm bf61",
       "--grad-comm is 'bf61'; did you mean 'bf16'?"},
      {"--model llama-1b --ranks 8 --moments int32", "--moments is 'int32'; "},
      {"--model llama-1b --ranks 8 --first-moment fp12", "--first-moment is 'fp12'; did you mean"},
      {"--model llama-1b --ranks 8 --second-moment fp64",
       "second_moment is fp64; it must be fp32, bf16"},
      {"--model llama-1b --ranks 8 --first-moment none",
       "second_moment is fp32, but first_moment is none; AdamW has both"},
      {"--model llama-1b --ranks 8 --main-storage splt",
       "--main-storage is 'splt'; did you mean 'split'?"},
      {"--model llama-1b --ranks 8 --batch 4",
       "--sequence is missing; the peak of a step needs both"},
      {"--model llama-1b --ranks 8 --sequence 4",
       "--batch is missing; the peak of a step needs both"},
      {"--model llama-1b --ranks 8 --batch 0 --sequence 4", "--batch is '0'"},
      {"--model llama-1b --ranks 8 --batch 1 --sequence 4 --compare",
       "--batch is '1', but --compare has no column for peaks"},
      {"--model llama-1b --ranks 8 --gradient-lifetime step",
       "--gradient-lifetime is 'step', which matters for the peak of a step alone"},
      {"--model llama-1b --ranks 8 --logit-memory 1GiB",
       "--logit-memory is '1GiB', which matters for the peak of a step alone"},
      {"--model llama-1b --ranks 8 --batch 1 --sequence 4 --logit-memory much",
       "--logit-memory is 'much'; it must be a size above 0"},
      {"--model deepseek-v3 --ranks 8 --batch 1 --sequence 4",
       "the activations of model 'deepseek-v3' in bf16 are not known"},
      {"--model llama-1b --ranks 8 --offload 1.5", "--offload is '1.5'; it must be a number from"},
      {"--model llama-1b --ranks 8 --offload half",
       "--offload is 'half'; it must be a number from"},
      {"--model llama-1b --ranks 8 --offload nan", "--offload is 'nan'; it must be a number from"},
      {"--model llama-1b --ranks 8 --pool maxpool",
       "--pool is 'maxpool'; did you mean 'max_pool'?"},
      {"--model llama-1b --ranks 8 --prefetch -1",
       "--prefetch is '-1'; it must be a whole number from 0"},
      {"--model llama-1b --ranks 8 --prefetch two", "--prefetch is 'two'"},
      {"--model llama-1b --ranks 8 --granularity rwo",
       "granularity 'rwo' is unknown; did you mean 'row'?"},
      {"--model llama-1b --ranks 8 --granularity 'block(0)'",
       "use element, row, block(n) with n >= 1"},
      {"--model llama-1b --ranks 8 --compare --strategy optim",
       "--compare shows every strategy; drop one"},
  };
  expect_refused(table);
}

TEST(PlanCommand, AnswersWrongWeightsWithOneSentence) {
  const std::vector<BadUse> table = {
      {"--model llama-1b --ranks 8 --weights fp8row",
       "--weights is 'fp8row'; did you mean 'fp8-row'?"},
      {"--model llama-1b --ranks 8 --weights fp8-row --weights-except '*.qproj.*'",
       "weights_except has '*.qproj.*', which matches no tensor"},
      {"--model llama-1b --ranks 8 --weights fp8-row --main-params none",
       "weights is fp8-row, for which main weights are fp32, but main_params is none"},
  };
  expect_refused(table);
}

TEST(PlanCommand, AnswersWhatMuonCannotDoWithOneSentence) {
  const TextFile file(
      "model.json", R"({"units": [{"name": "a", "tensors": [{"name": "w", "shape": [8, 16]}]}]})");
  const std::string of_shapes = "--ranks 8 --optimizer muon --model " + file.path();
  const std::vector<BadUse> table = {
      {"--model llama-1b --ranks 8 --optimizer muon --offload 0.5",
       "muon updates whole matrices, but offload is 0.5, which cuts shards anywhere; set it to 0"},
      {"--model llama-1b --ranks 8 --optimizer muon --tp 2",
       "muon updates whole matrices, which tp = 2 ranks share out"},
      {of_shapes.c_str(),
       "names no matrix of a linear layer or of experts; choose another optimizer"}};
  expect_refused(table);
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

TEST(PlanCommand, NamesTheFileAndTheField) {
  const TextFile broken("broken.json", "{\"model_type\": \"llama\",");
  const TextFile wrong("wrong.json", R"({"model_type": "llama", "vocab_size": "many"})");
  for (const auto& [file, says] : {std::pair(&broken, "not valid JSON, at line 1"),
                                   std::pair(&wrong, "vocab_size is \"many\"; it must be")}) {
    const CommandResult result = run_fsdp("plan --ranks 8 --model " + file->path());
    EXPECT_EQ(result.exit_code, 2);
    EXPECT_THAT(result.err, AllOf(StartsWith("fsdp: " + file->path()), HasSubstr(says)));
  }
}

}  // namespace
}  // namespace fsdp::cli_plan_test
