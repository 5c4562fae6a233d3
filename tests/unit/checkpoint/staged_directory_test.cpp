// A directory appears complete or not at all, and nothing is lost by accident.
#include "fsdp/checkpoint/run_directory.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>

#include "fsdp/base/error.h"
#include "support/error_of.h"
#include "support/stored_tensors.h"
#include "support/temp_dir.h"

namespace fsdp::testing::staged_directory_test {
namespace {

using ::testing::HasSubstr;
using ::testing::UnorderedElementsAre;
using Existing = StagedDirectory::Existing;

std::vector<std::string> names_in(const std::string& path) {
  std::vector<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator(path))
    names.push_back(entry.path().filename().string());
  return names;
}

class StagedDirectoryTest : public ::testing::Test {
 protected:
  void publish(const std::string& text, Existing existing = Existing::kRefuse) {
    StagedDirectory staged(target_, existing);
    write_text(staged.path() + "/x.safetensors", text);
    staged.publish();
  }

  TempDir directory_;
  std::string target_ = directory_ / "out";
};

TEST_F(StagedDirectoryTest, AppearsWhenItIsPublished) {
  StagedDirectory staged(target_ + "/", Existing::kRefuse);
  write_text(staged.path() + "/sub/file", "text");
  EXPECT_FALSE(std::filesystem::exists(target_));
  staged.publish();
  EXPECT_EQ(read_text(target_ + "/sub/file"), "text");
  EXPECT_THAT(names_in(directory_.path()), UnorderedElementsAre("out"));
}

TEST_F(StagedDirectoryTest, LeavesNothingWhenItIsNot) {
  {
    const StagedDirectory staged(target_, Existing::kRefuse);
    write_text(staged.path() + "/file", "text");
  }
  EXPECT_THAT(names_in(directory_.path()), UnorderedElementsAre());
}

TEST_F(StagedDirectoryTest, RefusesWhatIsThere) {
  publish("old");
  EXPECT_THAT(error_of<Error>([&] { publish("new"); }), HasSubstr("is there already"));
  { const StagedDirectory unpublished(target_, Existing::kReplace); }
  EXPECT_EQ(read_text(target_ + "/x.safetensors"), "old");
}

TEST_F(StagedDirectoryTest, ReplacesTheWholeDirectoryWhereAllowed) {
  publish("old");
  write_text(target_ + "/more", "text");
  publish("new", Existing::kReplace);
  EXPECT_THAT(names_in(target_), UnorderedElementsAre("x.safetensors"));
  EXPECT_EQ(read_text(target_ + "/x.safetensors"), "new");
  EXPECT_THAT(names_in(directory_.path()), UnorderedElementsAre("out"));
}

TEST_F(StagedDirectoryTest, NeverReplacesWhatIsNoCheckpoint) {
  write_text(target_ + "/thesis.txt", "years");
  EXPECT_THAT(error_of<Error>([&] { publish("new", Existing::kReplace); }),
              HasSubstr("not overwritten"));
  EXPECT_EQ(read_text(target_ + "/thesis.txt"), "years");
  const std::string file = directory_ / "file";
  write_text(file, "text");
  EXPECT_THAT(error_of<Error>([&] { StagedDirectory(file, Existing::kReplace); }),
              HasSubstr("not overwritten"));
  EXPECT_NE(error_of<Error>([&] { StagedDirectory("/", Existing::kReplace); }), "");
}

TEST_F(StagedDirectoryTest, RemovesWhatACrashLeft) {
  std::string left;
  {
    const StagedDirectory staged(target_, Existing::kRefuse);
    left = staged.path();
  }
  write_text(left + "/half", "of it");
  publish("whole");
  EXPECT_THAT(names_in(target_), UnorderedElementsAre("x.safetensors"));
}

TEST_F(StagedDirectoryTest, IsWrittenByOneAtATime) {
  StagedDirectory first(target_, Existing::kRefuse);
  write_text(first.path() + "/x.safetensors", "first");
  EXPECT_THAT(error_of<Error>([&] { publish("second"); }), HasSubstr("by another process"));
  first.publish();
  EXPECT_EQ(read_text(target_ + "/x.safetensors"), "first");
}

TEST_F(StagedDirectoryTest, DoesNotOverwriteWhatAppearsMeanwhile) {
  StagedDirectory staged(target_, Existing::kRefuse);
  write_text(target_ + "/x.safetensors", "somebody else's");
  EXPECT_THAT(error_of<Error>([&] { staged.publish(); }), HasSubstr("is there already"));
  EXPECT_EQ(read_text(target_ + "/x.safetensors"), "somebody else's");
}

}  // namespace
}  // namespace fsdp::testing::staged_directory_test
