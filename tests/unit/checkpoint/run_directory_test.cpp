// The directory of a run: names, its content after every crash, and deletion.
#include "fsdp/checkpoint/run_directory.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <functional>

#include "fsdp/base/durable_file.h"
#include "fsdp/base/error.h"
#include "fsdp/base/text.h"
#include "support/file_size_limit.h"
#include "support/temp_dir.h"

namespace fsdp::run_directory_test {
namespace {

namespace fs = std::filesystem;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;
using ::testing::StartsWith;
using ::testing::ThrowsMessage;

// A run's directory whose states are built by hand. A checkpoint's text tells it from others.
class RunDirectoryTest : public ::testing::Test {
 protected:
  // Not durably: nothing here outlives the test, and hundreds of them would take seconds.
  static void put_file(const std::string& path, const std::string& text) {
    std::ofstream(path) << text;
  }
  void put_checkpoint(const std::string& name, const std::string& text = "new") {
    fs::create_directories(dir_ / name + "/model");
    put_file(dir_ / name + "/model/file", text);
    put_file(dir_ / name + "/manifest.json", text);
  }
  void put_latest(const std::string& text) { put_file(dir_ / "latest", text); }

  // Saves as a run does.
  void save(int64_t step, const std::string& text = "new") {
    const std::string temporary = run_.temporary(step, "id");
    put_checkpoint(fs::path(temporary).filename().string(), text);
    run_.publish(step, "id");
  }

  std::string text_of(int64_t step) const {
    const std::string path = run_.path_of(step);
    const std::string text = read_text_file(path + "/manifest.json", 100);
    EXPECT_EQ(read_text_file(path + "/model/file", 100), text);
    return text;
  }

  std::vector<std::string> names() const {
    std::vector<std::string> names;
    for (const auto& entry : fs::directory_iterator(dir_.path()))
      names.push_back(entry.path().filename().string());
    std::sort(names.begin(), names.end());
    return names;
  }

  testing::TempDir dir_;
  RunDirectory run_{dir_.path()};
};

// --- names ---------------------------------------------------------------------------------------

TEST(CheckpointName, HasEightDigitsOrMoreAndIsTheOnlyOneOfItsStep) {
  EXPECT_EQ(checkpoint_name(100), "step-00000100");
  EXPECT_EQ(checkpoint_name(1'234'567'890), "step-1234567890");
  for (const int64_t step : {int64_t{0}, int64_t{99'999'999}, INT64_MAX})
    EXPECT_EQ(step_of(checkpoint_name(step)), step);
  for (const char* name :
       {"", "step-", "step-100", "step-0000010x", "step-00000100 ", "step--0000100",
        "step-+0000100", "step-000000100", "Step-00000100", "../step-00000100", "step-00000100/..",
        "step-00000100.replaced", "step-99999999999999999999", ".step-00000100"})
    EXPECT_EQ(step_of(name), std::nullopt) << name;
}

// --- looking -------------------------------------------------------------------------------------

TEST_F(RunDirectoryTest, ThatDoesNotExistYetHoldsNothing) {
  const RunDirectory run(dir_ / "not/yet");
  EXPECT_THAT(run.steps(), IsEmpty());
  EXPECT_EQ(run.latest(), std::nullopt);
  EXPECT_NO_THROW(run.remove_temporaries());
  EXPECT_NO_THROW(run.remove_old({.keep_last = 1}));
}

TEST_F(RunDirectoryTest, ListsCompleteCheckpointsByStep) {
  put_checkpoint("step-100000000");
  put_checkpoint("step-00000020");
  put_checkpoint("step-00000003");
  put_checkpoint(".step-00000040.id.tmp");
  put_checkpoint("step-50");
  put_checkpoint("mine");
  fs::create_directories(dir_ / "step-00000060");  // without a manifest
  put_file(dir_ / "step-00000070", "a file");
  EXPECT_THAT(run_.steps(), ElementsAre(3, 20, 100'000'000));
}

TEST_F(RunDirectoryTest, SaysWhichCheckpointsThereAreWhenOneIsNot) {
  EXPECT_THAT([&] { run_.path_of(5); },
              ThrowsMessage<Error>(AllOf(StartsWith(dir_ / "step-00000005"),
                                         HasSubstr("holds no complete checkpoint"))));
  put_checkpoint("step-00000001");
  put_checkpoint("step-00000002");
  EXPECT_EQ(run_.path_of(2), dir_ / "step-00000002");
  EXPECT_THAT([&] { run_.path_of(5); },
              ThrowsMessage<Error>(HasSubstr("holds step-00000001, step-00000002")));
  for (int step = 10; step < 40; ++step) put_checkpoint(checkpoint_name(step));
  EXPECT_THAT([&] { run_.path_of(5); },
              ThrowsMessage<Error>(AllOf(HasSubstr("step-00000039 and 12 older ones"),
                                         Not(HasSubstr("step-00000019")))));
}

TEST_F(RunDirectoryTest, LatestIsTheNewestThatTheFileDoesNotHide) {
  EXPECT_EQ(run_.latest(), std::nullopt);
  put_checkpoint("step-00000001");
  put_checkpoint("step-00000002");
  EXPECT_EQ(run_.latest(), 2);
  put_latest("step-00000001\n");  // by somebody who goes back
  EXPECT_EQ(run_.latest(), 1);
  put_latest("step-00000002");  // as an editor may leave it
  EXPECT_EQ(run_.latest(), 2);
}

TEST_F(RunDirectoryTest, AFileThatNamesNothingHidesNothing) {
  put_checkpoint("step-00000003");
  put_checkpoint("step-00000005");
  put_latest("step-00000004\n");
  EXPECT_EQ(run_.latest(), 3);
  put_latest("step-00000001\n");
  EXPECT_EQ(run_.latest(), 5);
  for (const std::string& text :
       {std::string(), std::string("\n"), std::string("best\n"), std::string("../step-00000003\n"),
        std::string("step-00000003\nstep-00000005"), std::string(1000, 'x')}) {
    put_latest(text);
    EXPECT_EQ(run_.latest(), 5) << text;
    EXPECT_EQ(resolve_checkpoint(dir_.path()), dir_ / "step-00000005") << text;
    EXPECT_EQ(checkpoint_or_files(dir_.path()), dir_ / "step-00000005") << text;
  }
}

TEST_F(RunDirectoryTest, RemainsOfCheckpointsAreNotTakenForNone) {
  EXPECT_NO_THROW(run_.refuse_remains());
  put_latest("step-00000003\n");
  fs::create_directories(dir_ / ".step-00000003.id.tmp");  // of a crash
  EXPECT_NO_THROW(run_.refuse_remains());
  fs::create_directories(dir_ / "step-00000003/model");
  EXPECT_THAT([&] { run_.refuse_remains(); },
              ThrowsMessage<Error>(
                  AllOf(StartsWith(dir_ / "step-00000003"), HasSubstr("no manifest.json"))));
  put_checkpoint("step-00000002");
  EXPECT_NO_THROW(run_.refuse_remains());
}

// --- publishing ----------------------------------------------------------------------------------

TEST_F(RunDirectoryTest, PublishesACheckpointAsTheLatest) {
  save(100);
  EXPECT_EQ(run_.latest(), 100);
  save(200);
  EXPECT_EQ(run_.latest(), 200);
  EXPECT_THAT(run_.steps(), ElementsAre(100, 200));
  EXPECT_THAT(names(), ElementsAre("latest", "step-00000100", "step-00000200"));
  EXPECT_EQ(read_text_file(dir_ / "latest", 100), "step-00000200\n");
}

TEST_F(RunDirectoryTest, PublishesNothingThatIsIncomplete) {
  save(100, "old");
  fs::create_directories(run_.temporary(100, "id"));
  EXPECT_THROW(run_.publish(100, "id"), InternalError);
  EXPECT_EQ(text_of(100), "old");
}

TEST_F(RunDirectoryTest, FailsOnAFullDiskWithTheOldOneAsTheLatest) {
  save(100, "old");
  put_checkpoint(".step-00000200.id.tmp");
  {
    const testing::FileSizeLimit limit(0);
    EXPECT_THAT([&] { run_.publish(200, "id"); }, ThrowsMessage<Error>(HasSubstr("latest")));
  }
  EXPECT_EQ(run_.latest(), 100);
  EXPECT_EQ(text_of(100), "old");
  save(200, "again");
  EXPECT_EQ(run_.latest(), 200);
  EXPECT_EQ(text_of(200), "again");
}

TEST_F(RunDirectoryTest, ReplacesWhatIsNoCheckpointUnderTheNameOfOne) {
  fs::create_directories(dir_ / "step-00000100/half/of/a/copy");
  save(100);
  put_file(dir_ / "step-00000200", "a file");
  save(200);
  EXPECT_THAT(run_.steps(), ElementsAre(100, 200));
  EXPECT_THAT(names(), ElementsAre("latest", "step-00000100", "step-00000200"));
}

TEST_F(RunDirectoryTest, TemporaryNamesAreHiddenAndTheIdIsPlain) {
  EXPECT_EQ(run_.temporary(7, "a-B_9"), dir_ / ".step-00000007.a-B_9.tmp");
  for (const char* id : {"", "a/b", "..", "a.b", "a b", "removed"})
    EXPECT_THAT([&] { run_.temporary(7, id); }, ThrowsMessage<Error>(HasSubstr("letters"))) << id;
}

// --- crashes -------------------------------------------------------------------------------------

// publish_crash_test ends a process at every instant of one save. Here are states of more than one:
// after any of them a run begins, finds the right checkpoint, and saves the same step again.
TEST_F(RunDirectoryTest, ARunGoesOnAfterSeveralCrashes) {
  struct Crash {
    const char* when;
    std::function<void()> leave;
    int64_t latest = 0;
    std::string text;
  };
  const auto put_directory = [&](const std::string& name) { fs::create_directories(dir_ / name); };
  const Crash crashes[] = {
      {"while a later step is hidden, of a run that went back to step 50",
       [&] {
         save(50, "old");
         put_checkpoint("step-00000100");
       },
       50, "old"},
      {"when the next is the latest and not there yet",
       [&] {
         save(50, "old");
         put_checkpoint("step-00000200", "of steps that the run went back from");
         put_checkpoint(".step-00000100.id.tmp");
         put_latest("step-00000100\n");
       },
       50, "old"},
      {"while the name of the latest is written",
       [&] {
         save(50, "old");
         put_checkpoint("step-00000100");
         put_file(dir_ / ".latest.0123456789abcdef.tmp", "step-000");
       },
       50, "old"},
      {"when the old one was set aside and the next run crashed before its latest",
       [&] {
         put_latest("step-00000100\n");
         put_checkpoint("step-00000100.replaced", "old");
         put_checkpoint("step-00000100", "new");
       },
       100, "new"},
      // Somebody's half of a copy must not push out the only complete one.
      {"when an incomplete one stands beside the one set aside",
       [&] {
         put_latest("step-00000100\n");
         put_checkpoint("step-00000100.replaced", "old");
         put_directory("step-00000100/model");
       },
       100, "old"}};
  for (const Crash& crash : crashes) {
    SCOPED_TRACE(crash.when);
    for (const std::string& name : names()) remove_tree(dir_ / name);
    crash.leave();
    for (const bool is_begun : {false, true}) {
      if (is_begun) run_.remove_temporaries();
      EXPECT_EQ(run_.latest(), crash.latest);
      EXPECT_EQ(text_of(crash.latest), crash.text);
    }
    save(100, "again");
    EXPECT_EQ(run_.latest(), 100);
    EXPECT_EQ(text_of(100), "again");
    for (const std::string& name : names())
      EXPECT_TRUE(name == "latest" || step_of(name).has_value()) << name;
  }
}

TEST_F(RunDirectoryTest, TheOneSetAsideIsFoundByEitherName) {
  put_latest("step-00000100\n");
  put_checkpoint("step-00000100.replaced", "old");
  EXPECT_THAT(run_.steps(), ElementsAre(100));
  for (const char* name : {"", "/step-00000100", "/step-00000100/"})
    EXPECT_EQ(resolve_checkpoint(dir_.path() + name), dir_ / "step-00000100.replaced");
  EXPECT_EQ(checkpoint_or_files(dir_ / "step-00000100"), dir_ / "step-00000100.replaced");
}

TEST_F(RunDirectoryTest, RemovesTemporariesAndNothingElse) {
  save(100);
  put_checkpoint("step-00000100.replaced", "old");   // its successor is in place
  put_checkpoint("step-00000200.replaced", "only");  // its successor is not
  for (const char* name :
       {".step-00000300.crashed.tmp", ".step-00000300.removed.tmp", ".latest.0123456789abcdef.tmp"})
    put_checkpoint(name);
  const std::vector<std::string> others = {".hidden",  ".hidden.tmp",    ".step-3.a.tmp",
                                           "logs.tmp", "notes.replaced", "step-00000300.tmp"};
  for (const std::string& name : others) put_checkpoint(name);
  run_.remove_temporaries();
  std::vector<std::string> stays = others;
  stays.insert(stays.end(), {"latest", "step-00000100", "step-00000200.replaced"});
  std::sort(stays.begin(), stays.end());
  EXPECT_EQ(names(), stays);
}

// --- deleting ------------------------------------------------------------------------------------

class RetentionTest : public RunDirectoryTest {
 protected:
  RetentionTest() {
    for (int64_t step = 100; step <= 1000; step += 100) put_checkpoint(checkpoint_name(step));
    put_latest("step-00001000\n");
  }
};

TEST_F(RetentionTest, KeepsTheLastOnesMultiplesAndWhatIsInUse) {
  run_.remove_old({});
  run_.remove_old({.keep_every = 500});
  run_.remove_old({.keep_last = 20});
  EXPECT_EQ(run_.steps().size(), 10u);
  const std::vector<int64_t> in_use = {200, 700, 12345};
  run_.remove_old({.keep_last = 3, .keep_every = 400}, in_use);
  EXPECT_THAT(run_.steps(), ElementsAre(200, 400, 700, 800, 900, 1000));
  run_.remove_old({.keep_last = 1});
  EXPECT_THAT(names(), ElementsAre("latest", "step-00001000"));
}

// A run that was resumed from an earlier step: later steps do not count until it reaches them.
TEST_F(RetentionTest, CountsFromTheLatestAndLeavesNewerOnes) {
  put_latest("step-00000500\n");
  run_.remove_old({.keep_last = 2});
  EXPECT_THAT(run_.steps(), ElementsAre(400, 500, 600, 700, 800, 900, 1000));
}

TEST_F(RetentionTest, RemovesTheOneSetAsideAlongAndFinishesADeletionThatCrashed) {
  put_checkpoint("step-00000100.replaced");
  put_checkpoint("step-00000050.replaced");
  put_checkpoint(".step-00000200.removed.tmp");
  run_.remove_old({.keep_last = 1});
  EXPECT_THAT(names(), ElementsAre("latest", "step-00001000"));
}

TEST_F(RetentionTest, RefusesNegativeNumbers) {
  EXPECT_THAT([] { validate({.keep_last = -1}); },
              ThrowsMessage<UsageError>(AllOf(HasSubstr("keep_last"), HasSubstr("-1"))));
  EXPECT_THAT([] { validate({.keep_every = -5}); },
              ThrowsMessage<UsageError>(AllOf(HasSubstr("keep_every"), HasSubstr("-5"))));
  EXPECT_THROW(run_.remove_old({.keep_last = -1}), UsageError);
}

// --- what a user means ---------------------------------------------------------------------------

TEST_F(RunDirectoryTest, ResolvesARunToItsLatestAndACheckpointToItself) {
  save(100);
  save(200);
  EXPECT_EQ(resolve_checkpoint(dir_.path()), dir_ / "step-00000200");
  EXPECT_EQ(resolve_checkpoint(dir_.path() + "/"), dir_ / "step-00000200");
  EXPECT_EQ(resolve_checkpoint(dir_ / "step-00000100"), dir_ / "step-00000100");
  put_checkpoint("exported");
  EXPECT_EQ(resolve_checkpoint(dir_ / "exported"), dir_ / "exported");
}

TEST_F(RunDirectoryTest, FilesOfOtherToolsStayWhatTheyAre) {
  fs::create_directories(dir_ / "llama");
  put_file(dir_ / "llama/model.safetensors", "");
  EXPECT_EQ(checkpoint_or_files(dir_ / "llama"), dir_ / "llama");
  EXPECT_EQ(checkpoint_or_files(dir_ / "llama/model.safetensors"),
            dir_ / "llama/model.safetensors");
  save(100, "new");
  EXPECT_EQ(checkpoint_or_files(dir_.path()), dir_ / "step-00000100");
  EXPECT_THAT([&] { checkpoint_or_files(dir_ / "nothing"); },
              ThrowsMessage<Error>(HasSubstr("there is no such directory")));
}

TEST_F(RunDirectoryTest, SaysWhatItLookedForWhereNothingIs) {
  const auto resolving = [](const std::string& path) {
    return [path] { resolve_checkpoint(path); };
  };
  EXPECT_THAT(
      resolving(dir_ / "gone"),
      ThrowsMessage<Error>(AllOf(StartsWith(dir_ / "gone"), HasSubstr("no such directory"))));
  EXPECT_THAT(resolving(dir_.path()),
              ThrowsMessage<Error>(AllOf(StartsWith(dir_.path()), HasSubstr("manifest.json"),
                                         HasSubstr("no complete checkpoint"))));
  put_file(dir_ / "file", "");
  EXPECT_THAT(resolving(dir_ / "file"), ThrowsMessage<Error>(HasSubstr("manifest.json")));
  EXPECT_THAT(resolving(""), ThrowsMessage<Error>(HasSubstr("give a path")));
}

}  // namespace
}  // namespace fsdp::run_directory_test
