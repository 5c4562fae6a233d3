// `fsdp convert` as users run it: there and back, what does not fit, and nothing by halves.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>

#include <nlohmann/json.hpp>
#include <string>

#include "processes/run_command.h"
#include "support/stored_tensors.h"
#include "support/temp_dir.h"

namespace fsdp::testing::cli_convert_test {
namespace {

using test::CommandResult;
using test::run_fsdp;
using ::testing::AllOf;
using ::testing::EndsWith;
using ::testing::HasSubstr;
using ::testing::Not;
using Json = nlohmann::ordered_json;

// The smallest Llama: one layer of width 4.
Json llama_config(bool tied) {
  return {{"model_type", "llama"},    {"vocab_size", 6},          {"hidden_size", 4},
          {"num_hidden_layers", 1},   {"num_attention_heads", 2}, {"num_key_value_heads", 1},
          {"intermediate_size", 3},   {"rms_norm_eps", 1e-05},    {"tie_word_embeddings", tied},
          {"torch_dtype", "bfloat16"}};
}

std::vector<WholeTensor> llama_weights(bool tied) {
  const std::string layer = "model.layers.0.";
  std::vector<WholeTensor> weights = {
      counting("model.embed_tokens.weight", {6, 4}),
      counting(layer + "input_layernorm.weight", {4}, 0.5f),
      counting(layer + "self_attn.q_proj.weight", {4, 4}, 1.5f),
      counting(layer + "self_attn.k_proj.weight", {2, 4}, 2.5f),
      counting(layer + "self_attn.v_proj.weight", {2, 4}, 3.5f),
      counting(layer + "self_attn.o_proj.weight", {4, 4}, 4.5f),
      counting(layer + "post_attention_layernorm.weight", {4}, 5.5f),
      counting(layer + "mlp.gate_proj.weight", {3, 4}, 6.5f),
      counting(layer + "mlp.up_proj.weight", {3, 4}, 7.5f),
      counting(layer + "mlp.down_proj.weight", {4, 3}, 8.5f),
      counting("model.norm.weight", {4}, 9.5f)};
  if (!tied) weights.push_back(counting("lm_head.weight", {6, 4}, 10.5f));
  return weights;
}

class ConvertCommand : public ::testing::Test {
 protected:
  void write_llama(bool tied) {
    write_plain_file(hf_ + "/model.safetensors", llama_weights(tied));
    write_text(hf_ + "/config.json", llama_config(tied).dump(2));
  }

  // Whatever the test's own environment says.
  static CommandResult convert(const std::string& arguments) {
    return run_fsdp("convert " + arguments, "FSDP_LOG=info");
  }

  static void expect_same(const std::string& a, const std::string& b) {
    const CommandResult result = run_fsdp("inspect " + a + " --diff " + b);
    EXPECT_EQ(result.exit_code, 0) << result.out << result.err;
  }

  // Wrong in a way that leaves no trace of the conversion.
  void expect_error(const CommandResult& result, int exit_code, const std::string& says) const {
    test::expect_error(result, exit_code, says);
    EXPECT_FALSE(std::filesystem::exists(out_)) << says;
    EXPECT_FALSE(std::filesystem::exists(directory_ / ".out.tmp")) << says;
  }

  TempDir directory_;
  std::string hf_ = directory_ / "hf";
  std::string out_ = directory_ / "out";
  std::string ours_ = directory_ / "ours";
};

TEST_F(ConvertCommand, GoesToShardedAndBack) {
  for (const bool tied : {false, true}) {
    write_llama(tied);
    const CommandResult in = convert(hf_ + " " + ours_ + " --to sharded --overwrite --ranks 3");
    EXPECT_EQ(in.exit_code, 0) << in.err;
    EXPECT_THAT(in.out, HasSubstr(tied ? "11 tensors, 120 parameters" : "12 tensors, 144"));
    EXPECT_THAT(in.err, EndsWith(tied ? "convert 100 % of 480 B\n" : "convert 100 % of 576 B\n"));
    EXPECT_EQ(read_text(ours_ + "/config.json"), read_text(hf_ + "/config.json"));
    EXPECT_EQ(run_fsdp("inspect " + ours_ + " --verify").exit_code, 0);
    expect_same(hf_, ours_);
    const CommandResult back = convert(ours_ + " " + out_ + " --to hf --overwrite");
    EXPECT_EQ(back.exit_code, 0) << back.err;
    expect_same(hf_, out_);
    Json expected = llama_config(tied);
    expected["torch_dtype"] = "float32";  // what is stored
    expected["dtype"] = "float32";
    EXPECT_EQ(Json::parse(read_text(out_ + "/config.json")), expected);
  }
}

TEST_F(ConvertCommand, CutsFilesAndConvertsTypes) {
  write_llama(false);
  convert(hf_ + " " + ours_ + " --to sharded --ranks 2 --dtype bf16");
  EXPECT_THAT(run_fsdp("inspect " + ours_).out,
              AllOf(HasSubstr("288 B, bf16"), HasSubstr("weights alone, bf16")));
  convert(ours_ + " " + out_ + " --to hf --dtype fp32 --max-shard-size 200");
  EXPECT_TRUE(std::filesystem::exists(out_ + "/model-00001-of-00004.safetensors"));
  EXPECT_TRUE(std::filesystem::exists(out_ + "/model.safetensors.index.json"));
  expect_same(hf_, out_);  // halves up to 40 are exact in bf16
}

TEST_F(ConvertCommand, RefusesWhatDoesNotFitItsConfiguration) {
  write_llama(false);
  write_text(directory_ / "other.json", llama_config(true).dump());
  expect_error(convert(hf_ + " " + out_ + " --to sharded --config " + (directory_ / "other.json")),
               1, "have different values");
  Json wide = llama_config(false);
  wide["intermediate_size"] = 5;
  wide["num_hidden_layers"] = 2;
  write_text(directory_ / "wide.json", wide.dump());
  expect_error(convert(hf_ + " " + out_ + " --to sharded --config " + (directory_ / "wide.json")),
               1, "mlp.gate_proj.weight [3, 4] instead of [5, 4]");
  write_text(directory_ / "broken.json", "{");
  expect_error(convert(hf_ + " " + out_ + " --to sharded --config " + (directory_ / "broken.json")),
               1, "broken.json: not valid JSON");
  convert(hf_ + " " + ours_ + " --to sharded");
  expect_error(convert(ours_ + " " + out_ + " --to hf --config " + (directory_ / "wide.json")), 1,
               "it lacks 'model.layers.1.input_layernorm.weight'");
}

TEST_F(ConvertCommand, ConvertsModelsItDoesNotKnowAndSaysSo) {
  write_plain_file(hf_ + "/model.safetensors", {counting("w", {3, 2})});
  CommandResult result = convert(hf_ + " " + ours_ + " --to sharded");
  EXPECT_EQ(result.exit_code, 0);
  EXPECT_THAT(result.err, HasSubstr("has no config.json, so names and shapes are not checked"));
  result = convert(ours_ + " " + out_ + " --to hf");
  EXPECT_EQ(result.exit_code, 0);
  EXPECT_THAT(result.err, HasSubstr("has no config.json, so none is written"));
  expect_same(hf_, out_);
  write_text(hf_ + "/config.json", R"({"model_type": "mystery"})");
  result = convert(hf_ + " " + out_ + " --to hf --overwrite");
  EXPECT_EQ(result.exit_code, 0);
  EXPECT_THAT(result.err, HasSubstr("model_type 'mystery' is not known"));
}

TEST_F(ConvertCommand, RenamesAndDividesByRules) {
  write_plain_file(hf_ + "/model.safetensors", {counting("m.kv", {4, 2}), counting("m.norm", {2})});
  write_text(directory_ / "rules.json",
             R"({"rules": [{"pattern": "kv", "sections": [{"name": "k"}, {"name": "v"}]},
                           {"pattern": "norm", "rename": "ln"}]})");
  const CommandResult result =
      convert(hf_ + " " + out_ + " --to hf --names " + (directory_ / "rules.json"));
  EXPECT_EQ(result.exit_code, 0) << result.err;
  write_plain_file(directory_ / "expected.safetensors",
                   {counting("m.k", {2, 2}), counting("m.v", {2, 2}, 4.0f), counting("m.ln", {2})});
  expect_same(directory_ / "expected.safetensors", out_);
  write_text(directory_ / "rules.json", R"({"rules": 3})");
  remove_tree(out_);
  expect_error(convert(hf_ + " " + out_ + " --to hf --names " + (directory_ / "rules.json")), 2,
               "rules.json: rules is 3");
}

TEST_F(ConvertCommand, CutsACheckpointAnewWithAllItHolds) {
  CheckpointParts parts{.model = {counting("w", {6, 4})},
                        .moments = {counting("w.exp_avg", {6, 4}, 0.5f)},
                        .ranks = std::vector<RankRecord>(2)};
  parts.manifest.step = 7;
  parts.manifest.mesh = {.outer = 1, .inner = 2};
  parts.manifest.optimizer = {.name = "AdamW", .moments = {"exp_avg"}, .step = 7};
  parts.ranks[1].data_position = "page 9";
  write_checkpoint(ours_, parts, {.ranks = 2});
  CommandResult result = convert(ours_ + " " + out_ + " --to sharded --ranks 3 --dtype bf16");
  EXPECT_EQ(result.exit_code, 0) << result.err;
  EXPECT_THAT(result.err, HasSubstr("left out: random states and data positions of 2 ranks"));
  const TensorCatalog recut(out_);
  EXPECT_EQ(recut.manifest()->step, 7);
  EXPECT_EQ(recut.manifest()->optimizer, parts.manifest.optimizer);
  EXPECT_EQ(recut.manifest()->num_ranks(), 3);
  EXPECT_EQ(recut.model().at("w").tensor.dtype, DType::kBFloat16);
  EXPECT_EQ(bytes_of_stored(recut, recut.moments().at("w.exp_avg")), parts.moments[0].bytes);
  result = convert(ours_ + " " + out_ + " --to sharded --ranks 2 --overwrite");
  EXPECT_THAT(result.err, Not(HasSubstr("left out")));
  EXPECT_EQ(TensorCatalog(out_).ranks()[1].data_position, "page 9");
}

TEST_F(ConvertCommand, ReplacesOnlyWhereAsked) {
  write_llama(false);
  CommandResult result = convert(hf_ + " " + hf_ + " --to hf --dtype bf16");
  EXPECT_EQ(result.exit_code, 1);
  EXPECT_THAT(result.err, HasSubstr("is there already; choose another name"));
  // Onto itself: the source is read to its end before it goes.
  result = convert(hf_ + " " + hf_ + " --to hf --overwrite --dtype bf16");
  EXPECT_EQ(result.exit_code, 0) << result.err;
  EXPECT_EQ(TensorCatalog(hf_).model().at("model.norm.weight").tensor.dtype, DType::kBFloat16);
}

TEST_F(ConvertCommand, LeavesNothingOfADamagedSource) {
  write_llama(false);
  convert(hf_ + " " + ours_ + " --to sharded --ranks 2");
  change_byte(ours_ + "/model/00001-0.safetensors", -1);
  expect_error(convert(ours_ + " " + out_ + " --to hf"), 1, "are not what was written");
  write_plain_file(hf_ + "/model.safetensors", {floats("w", {2}, {1.0f, 1e30f})});
  std::filesystem::remove(hf_ + "/config.json");
  expect_error(convert(hf_ + " " + out_ + " --to hf --dtype fp16"), 1, "too large for fp16");
}

TEST_F(ConvertCommand, SaysWhatIsWrongWithItsUse) {
  write_llama(false);
  const std::string both = hf_ + " " + out_;
  expect_error(convert(hf_), 2, "SRC and DST are needed");
  expect_error(convert(both), 2, "--to is missing");
  expect_error(convert(both + " --to hff"), 2, "did you mean 'hf'?");
  expect_error(convert(both + " --to hf --dtype fp8"), 2, "--dtype is 'fp8'");
  expect_error(convert(both + " --to hf --ranks 2"), 2, "it is for --to sharded");
  expect_error(convert(both + " --to sharded --ranks 0"), 2, "--ranks is '0'");
  expect_error(convert(both + " --to sharded --max-shard-size 1GB"), 2, "it is for --to hf");
  expect_error(convert(both + " --to hf --max-shard-size much"), 2, "--max-shard-size is 'much'");
  expect_error(convert((directory_ / "nothing") + " " + out_ + " --to hf"), 1, "no such directory");
}

// Bytes of the largest process so far that was waited for.
int64_t peak_child_bytes() {
  rusage usage{};
  ::getrusage(RUSAGE_CHILDREN, &usage);
  return int64_t{usage.ru_maxrss} * 1024;
}

// Written in parts: the peak of a child includes what its parent had when it was started.
void write_large_file(const std::string& path, int64_t mebibytes) {
  SafetensorsHeader header;
  SafetensorsEntry& entry = header.tensors.emplace_back();
  entry.name = "w";
  entry.shape = {mebibytes, 1 << 18};
  std::ofstream file(path, std::ios::binary);
  file << write_safetensors_header(header);
  const std::string part(size_t{1} << 20, 'x');
  for (int64_t i = 0; i < mebibytes; ++i) file << part;
}

// 240 MiB in one tensor go through chunks of 16 MiB, some of them twice, and 8 MiB per thread.
TEST_F(ConvertCommand, HoldsAChunkInMemoryHoweverLargeTensorsAre) {
  write_llama(false);
  ASSERT_EQ(convert(hf_ + " " + ours_ + " --to sharded").exit_code, 0);
  const int64_t before = peak_child_bytes();
  write_large_file(directory_ / "large.safetensors", 240);
  ASSERT_EQ(convert((directory_ / "large.safetensors") + " " + out_ + " --to sharded --ranks 3")
                .exit_code,
            0);
  ASSERT_EQ(convert(out_ + " " + (directory_ / "back") + " --to hf --dtype bf16").exit_code, 0);
  EXPECT_LT(peak_child_bytes() - before, int64_t{128} << 20);
}

}  // namespace
}  // namespace fsdp::testing::cli_convert_test
