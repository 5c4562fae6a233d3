// Every kind of damage is found and named, all of it in one go.
#include "fsdp/checkpoint/tools/verify_files.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "fsdp/base/check.h"
#include "fsdp/checkpoint/format/manifest.h"
#include "support/stored_tensors.h"
#include "support/temp_dir.h"

namespace fsdp::testing::verify_files_test {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::Field;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::StartsWith;

constexpr int64_t kBlock = 256;

class VerifyFiles : public ::testing::Test {
 protected:
  VerifyFiles() : path_(directory_ / "step-00000001") {
    write_checkpoint(path_,
                     {.model = {counting("w", {80, 15}), counting("b", {80})},
                      .moments = {counting("w.exp_avg", {80, 15}, 0.5f)},
                      .config = "{}"},
                     {.ranks = 2, .write = {.block_bytes = kBlock}});
  }

  std::string file(const std::string& name) const { return path_ + "/" + name; }

  static auto damage(const std::string& path, const std::string& what) {
    return AllOf(Field(&DamagedPart::path, path), Field(&DamagedPart::what, HasSubstr(what)));
  }

  TempDir directory_;
  std::string path_;
};

TEST_F(VerifyFiles, FindsNothingInWhatWasWritten) {
  std::vector<std::pair<int64_t, int64_t>> progress;
  const Verification result =
      verify_files(path_, [&](int64_t done, int64_t total) { progress.emplace_back(done, total); });
  EXPECT_TRUE(result.has_checksums);
  EXPECT_TRUE(result.has_manifest_checksum);
  EXPECT_THAT(result.damaged, IsEmpty());
  EXPECT_EQ(result.num_files, 2 + 2 + 2 + 1);  // model, optimizer, ranks, config.json
  EXPECT_TRUE(std::is_sorted(progress.begin(), progress.end()));
  EXPECT_EQ(progress.back(), std::pair(result.bytes, result.bytes));
}

TEST_F(VerifyFiles, NamesEveryDamagedBlockOfEveryFile) {
  const std::string model = file("model/00000-0.safetensors");
  change_byte(model, kBlock * 3 + 5);
  change_byte(model, kBlock * 4 + 5);  // a neighbour: one range with it
  change_byte(model, -1);
  change_byte(file("optimizer/00001-0.safetensors"), 3);
  const auto size = std::filesystem::file_size(model);
  EXPECT_THAT(
      verify_files(path_).damaged,
      ElementsAre(
          damage("model/00000-0.safetensors", "bytes 768 to 1280 are not what was written"),
          damage("model/00000-0.safetensors",
                 concat("bytes ", (size - 1) / kBlock * kBlock, " to ", size)),
          damage("optimizer/00001-0.safetensors", "bytes 0 to 256 are not what was written")));
}

TEST_F(VerifyFiles, NamesMissingShortAndLongFiles) {
  std::filesystem::remove(file("model/00000-0.safetensors"));
  const std::string shorter = file("model/00001-0.safetensors");
  const auto bytes = static_cast<int64_t>(std::filesystem::file_size(shorter));
  std::filesystem::resize_file(shorter, static_cast<uintmax_t>(bytes - 300));
  change_byte(shorter, 10);  // what is left is checked, too
  write_text(file("optimizer/00000-0.safetensors"),
             read_text(file("optimizer/00000-0.safetensors")) + "x");
  EXPECT_THAT(verify_files(path_).damaged,
              ElementsAre(damage("model/00000-0.safetensors", "No such file"),
                          damage("optimizer/00000-0.safetensors", "instead of"),
                          damage("model/00001-0.safetensors",
                                 concat("has ", bytes - 300, " bytes instead of ", bytes)),
                          damage("model/00001-0.safetensors", "bytes 0 to 256")));
}

TEST_F(VerifyFiles, ChecksWholeFilesWhereARankRecordIsLost) {
  change_byte(file("ranks/00001.json"), -3);
  EXPECT_THAT(verify_files(path_).damaged,
              ElementsAre(damage("ranks/00001.json", "is not what was written")));
  change_byte(file("model/00001-0.safetensors"), -1);
  EXPECT_THAT(verify_files(path_).damaged,
              ElementsAre(damage("ranks/00001.json", "is not what was written"),
                          damage("model/00001-0.safetensors", "is not what was written")));
}

TEST_F(VerifyFiles, FindsWhatDoesNotFitTogetherThoughChecksumsDo) {
  std::string manifest = read_text(file("manifest.json"));
  const size_t at = manifest.find("\"shape\"");
  manifest.replace(manifest.find("80", at), 2, "81");
  write_text(file("manifest.json"), with_checksum(manifest));
  EXPECT_THAT(verify_files(path_).damaged, ElementsAre(damage("manifest.json", "not complete")));
}

TEST_F(VerifyFiles, ReadsFilesOfOtherToolsWithoutChecksums) {
  const std::string plain = directory_ / "plain/model.safetensors";
  write_plain_file(plain, {counting("w", {40, 16})});
  const Verification result = verify_files(directory_ / "plain");
  EXPECT_FALSE(result.has_checksums);
  EXPECT_THAT(result.damaged, IsEmpty());
  EXPECT_EQ(result.bytes, static_cast<int64_t>(std::filesystem::file_size(plain)));
  std::filesystem::resize_file(plain, 1000);
  EXPECT_THROW(verify_files(directory_ / "plain"), Error);
}

}  // namespace
}  // namespace fsdp::testing::verify_files_test
