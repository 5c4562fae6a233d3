// `fsdp inspect` as users run it: tables, JSON, damage, differences, and every wrong use.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <nlohmann/json.hpp>
#include <string>

#include "processes/run_command.h"
#include "support/stored_tensors.h"
#include "support/temp_dir.h"

namespace fsdp::testing::cli_inspect_test {
namespace {

using test::CommandResult;
using test::expect_error;
using test::run_fsdp;
using ::testing::AllOf;
using ::testing::EndsWith;
using ::testing::HasSubstr;
using ::testing::Not;
using Json = nlohmann::json;

CheckpointParts trained(float first = 0.0f) {
  CheckpointParts parts{.model = {counting("model.w", {6, 4}, first), counting("model.b", {6})},
                        .moments = {counting("model.w.exp_avg", {6, 4})}};
  parts.manifest.step = 100;
  parts.manifest.strategy = "optim_grads_params";
  parts.manifest.precision = "main_params fp32";
  parts.manifest.optimizer = {.name = "AdamW", .moments = {"exp_avg"}, .step = 100, .skipped = 2};
  return parts;
}

class InspectCommand : public ::testing::Test {
 protected:
  // A run with checkpoints of steps 50 and 100.
  InspectCommand() : run_(directory_ / "run"), path_(run_ + "/step-00000100") {
    write_checkpoint(run_ + "/step-00000050", trained(), {.ranks = 1});
    write_checkpoint(path_, trained(), {.ranks = 3, .write = {.block_bytes = 64}});
    write_text(run_ + "/latest", "step-00000100\n");
  }

  static CommandResult inspect(const std::string& arguments) {
    return run_fsdp("inspect " + arguments);
  }

  TempDir directory_;
  std::string run_;
  std::string path_;
};

TEST_F(InspectCommand, ShowsTheLatestCheckpointOfARun) {
  const CommandResult result = inspect(run_);
  EXPECT_EQ(result.exit_code, 0);
  EXPECT_EQ(result.err, "");
  EXPECT_THAT(result.out, HasSubstr("path        " + path_ + "\n"));
  for (const char* row :
       {"run's steps 50, 100\n", "step        100\n", "ranks       3\n",
        "strategy    optim_grads_params\n", "precision   main_params fp32\n",
        "optimizer   AdamW after 100 steps, 2 skipped\n",
        "model       2 tensors, 30 parameters, 120 B, fp32\n",
        "moments     1 tensor, 24 elements, 96 B, fp32\n", "files       6 with tensors"})
    EXPECT_THAT(result.out, HasSubstr(row));
}

TEST_F(InspectCommand, ListsTensorsByPattern) {
  const CommandResult all = inspect(path_ + " --tensors '*'");
  EXPECT_THAT(all.out, AllOf(HasSubstr("model.b "), HasSubstr("model.w.exp_avg"),
                             Not(HasSubstr("run's steps")), Not(HasSubstr("min"))));
  const CommandResult one = inspect(path_ + " --tensors '*.w'");
  EXPECT_THAT(one.out, AllOf(HasSubstr("model.w  fp32  [6, 4]  96 B  3\n"),
                             Not(HasSubstr("model.b")), Not(HasSubstr("exp_avg"))));
  expect_error(inspect(path_ + " --tensors modl.w"), 1, "is 'model.w' meant?");
}

TEST_F(InspectCommand, StatisticsHaveALineForEachTensor) {
  EXPECT_THAT(inspect(path_ + " --stats").out,
              AllOf(HasSubstr("min 0  max 23  mean 11.5  std 6.922  nan 0  inf 0"),
                    HasSubstr("  |@"), HasSubstr("model.w.exp_avg")));
}

TEST_F(InspectCommand, JsonHasTheDocumentedKeys) {
  const Json report = Json::parse(inspect(run_ + " --json --stats --verify").out);
  EXPECT_EQ(report.at("path"), path_);
  EXPECT_EQ(report.at("format"), "fsdp.cpp");
  EXPECT_EQ(report.at("steps"), Json({50, 100}));
  EXPECT_EQ(report.at("step"), 100);
  EXPECT_EQ(report.at("mesh").at("inner"), 3);
  EXPECT_EQ(report.at("optimizer").at("name"), "AdamW");
  EXPECT_EQ(report.at("model").at("elements"), 30);
  EXPECT_EQ(report.at("files").size(), 6u);
  EXPECT_EQ(report.at("tensors").at(1).at("name"), "model.w");
  EXPECT_EQ(report.at("tensors").at(1).at("parts"), 3);
  EXPECT_EQ(report.at("tensors").at(1).at("statistics").at("max"), 23);
  EXPECT_EQ(report.at("tensors").at(1).at("statistics").at("histogram").size(), 32u);
  EXPECT_TRUE(report.at("verification").at("damaged").empty());
}

TEST_F(InspectCommand, ShowsFilesOfOtherTools) {
  write_plain_file(directory_ / "hf/model.safetensors", trained().model);
  for (const char* path : {"hf", "hf/model.safetensors"}) {
    const CommandResult result = inspect(directory_ / path);
    EXPECT_EQ(result.exit_code, 0) << result.err;
    EXPECT_THAT(result.out, AllOf(HasSubstr("safetensors files of other tools"),
                                  HasSubstr("2 tensors, 30 parameters")));
  }
  EXPECT_THAT(inspect((directory_ / "hf") + " --verify").out, HasSubstr("there are no checksums"));
}

TEST_F(InspectCommand, NamesEverythingThatIsDamaged) {
  change_byte(path_ + "/model/00000-0.safetensors", -1);
  change_byte(path_ + "/optimizer/00002-0.safetensors", 0);
  const CommandResult result = inspect(run_ + " --verify");
  expect_error(result, 1, "is damaged in 2 places; use another checkpoint");
  EXPECT_THAT(result.out, AllOf(HasSubstr("damaged     model/00000-0.safetensors: bytes "),
                                HasSubstr("damaged     optimizer/00002-0.safetensors: bytes 0 ")));
  const Json report = Json::parse(inspect(run_ + " --verify --json").out);
  EXPECT_EQ(report.at("verification").at("damaged").size(), 2u);
  // Without --verify the first broken header ends it.
  expect_error(inspect(run_), 1, "optimizer/00002-0.safetensors");
}

TEST_F(InspectCommand, DiffOfEqualTensorsIsFineHoweverTheyAreCut) {
  const CommandResult result = inspect(path_ + " --diff " + run_ + "/step-00000050");
  EXPECT_EQ(result.exit_code, 0) << result.err;
  EXPECT_EQ(result.out, "no difference in 3 tensors\n");
}

TEST_F(InspectCommand, DiffTellsWhatDiffers) {
  CheckpointParts other = trained(0.5f);
  other.model[1] = counting("model.b", {3, 2});
  other.moments[0].name = "model.w.exp_avg_sq";
  other.model.push_back(counting("new", {1}));
  write_checkpoint(directory_ / "other", other);
  const std::string arguments = path_ + " --diff " + (directory_ / "other");
  const CommandResult result = inspect(arguments);
  expect_error(result, 1, "differ in 5 tensors");
  for (const char* line :
       {"only in the first   model.w.exp_avg\n", "only in the second  model.w.exp_avg_sq\n",
        "only in the second  new\n", "other shape         model.b: [6] and [3, 2]\n",
        "other values        model.w: 24 of 24 elements differ, by at most 0.5\n"})
    EXPECT_THAT(result.out, HasSubstr(line));
  const CommandResult json = inspect(arguments + " --json");
  EXPECT_EQ(json.exit_code, 1);
  const Json report = Json::parse(json.out);
  ASSERT_EQ(report.at("differences").size(), 5u);
  EXPECT_EQ(report.at("differences").at(1).at("num_different"), 24);
  EXPECT_EQ(report.at("differences").at(1).at("max_difference"), 0.5);
  // A pattern narrows it.
  EXPECT_THAT(inspect(arguments + " --tensors model.w").out, Not(HasSubstr("new")));
}

TEST_F(InspectCommand, DiffShowsTwentyOfAKind) {
  std::vector<WholeTensor> many;
  for (int i = 0; i < 30; ++i) many.push_back(counting("t" + std::to_string(i), {1}));
  write_plain_file(directory_ / "many.safetensors", many);
  write_plain_file(directory_ / "none.safetensors", {counting("x", {1})});
  EXPECT_THAT(
      inspect((directory_ / "many.safetensors") + " --diff " + (directory_ / "none.safetensors"))
          .out,
      HasSubstr("... and 10 more of this kind"));
}

TEST_F(InspectCommand, VerifySaysThatAnOldManifestHasNoChecksum) {
  const std::string file = path_ + "/manifest.json";
  Json manifest = Json::parse(read_text(file));
  manifest["version"] = 1;
  manifest.erase("crc32c");
  write_text(file, manifest.dump(1));
  const CommandResult result = inspect(path_ + " --verify");
  EXPECT_EQ(result.exit_code, 0) << result.err;
  EXPECT_THAT(result.out, HasSubstr("verified    9 files"));
  EXPECT_THAT(result.err, HasSubstr("verify 100 %"));
  EXPECT_THAT(result.out, EndsWith("is of an old version and has no checksum itself\n"));
}

TEST_F(InspectCommand, SaysWhatIsWrongWithItsUse) {
  expect_error(inspect(""), 2, "PATH is missing");
  expect_error(inspect(path_ + " --diff " + path_ + " --verify"), 2, "goes without --verify");
  expect_error(inspect(path_ + " --diff ''"), 2, "--diff is ''; give the checkpoint");
  expect_error(inspect(path_ + " --tensor x"), 2, "did you mean '--tensors'?");
}

TEST_F(InspectCommand, SaysWhatIsWrongWithAPath) {
  expect_error(inspect(directory_ / "nothing"), 1, "there is no such directory");
  write_text(directory_ / "empty/readme", "");
  expect_error(inspect(directory_ / "empty"), 1, "holds neither a manifest.json nor safetensors");
  write_text(directory_ / "no.safetensors", "{}");
  expect_error(inspect(directory_ / "no.safetensors"), 1, "no.safetensors has 2 bytes");
  for (const char* name : {"pipe", "pipe.safetensors"}) {
    ASSERT_EQ(::mkfifo((directory_ / name).c_str(), 0600), 0);
    expect_error(inspect(directory_ / name), 1, name);
  }
}

TEST_F(InspectCommand, ShowsNoControlCharacters) {
  CheckpointParts parts{.model = {counting("\x1b[2J" + std::string(5000, 'n'), {1})}};
  parts.manifest.strategy = "\x1b[2J";
  write_checkpoint(directory_ / "ours", parts);
  const std::string table = inspect((directory_ / "ours") + " --tensors '*'").out;
  EXPECT_THAT(table, AllOf(HasSubstr("strategy    \\x1b[2J\n"), HasSubstr("\\x1b[2Jnnn")));
  EXPECT_THAT(table, Not(HasSubstr("\x1b")));
}

}  // namespace
}  // namespace fsdp::testing::cli_inspect_test
