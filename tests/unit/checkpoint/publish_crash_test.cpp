// A process that dies at any instant of publishing or deleting leaves a run that continues; the
// same of patches.
//
// The program's own rename(), fsync() and unlinkat() stand in for the C library's, and end a child
// process before the n-th call, for every n.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <functional>
#include <set>
#include <string>
#include <vector>

#include "fsdp/base/durable_file.h"
#include "fsdp/checkpoint/patches/applied_patches.h"
#include "fsdp/checkpoint/patches/patch_files.h"
#include "fsdp/checkpoint/run_directory.h"
#include "support/stored_tensors.h"
#include "support/temp_dir.h"

namespace {

constexpr int kCrashed = 42;  // exit status
int g_calls_left = -1;        // before the crash; negative: none

void count_call() {
  if (g_calls_left == 0) ::_exit(kCrashed);
  if (g_calls_left > 0) --g_calls_left;
}

}  // namespace

extern "C" {
[[gnu::visibility("default")]] int rename(const char* from, const char* to) noexcept {
  count_call();
  return ::renameat(AT_FDCWD, from, AT_FDCWD, to);
}
[[gnu::visibility("default")]] int fsync(int) {  // the machine goes on, so there is nothing to do
  count_call();
  return 0;
}
[[gnu::visibility("default")]] int unlinkat(int directory, const char* name, int flags) noexcept {
  count_call();
  return static_cast<int>(::syscall(SYS_unlinkat, directory, name, flags));
}
}

namespace fsdp::publish_crash_test {
namespace {

namespace fs = std::filesystem;

void put_checkpoint(const std::string& path, const std::string& text) {
  fs::create_directories(path + "/model");
  for (const char* file : {"/model/one", "/model/two", "/manifest.json"})
    std::ofstream(path + file) << text;
}

// Complete, all of it from the same save.
std::string text_of(const std::string& checkpoint) {
  const std::string text = read_text_file(checkpoint + "/manifest.json", 100);
  for (const char* file : {"/model/one", "/model/two"})
    EXPECT_EQ(read_text_file(checkpoint + file, 100), text) << checkpoint;
  return text;
}

// Runs `change` in a child that dies before its n-th call, for n = 0, 1, ... until it survives,
// each time in a new directory made by `prepare`; `check` looks at what is left. Returns the number
// of crashes.
int crash_everywhere(const std::function<void(const RunDirectory&)>& prepare,
                     const std::function<void(const RunDirectory&)>& change,
                     const std::function<void(const RunDirectory&)>& check) {
  for (int num_crashes = 0;; ++num_crashes) {
    const testing::TempDir dir;
    const RunDirectory run(dir.path());
    prepare(run);
    const pid_t child = ::fork();
    if (child == 0) {
      g_calls_left = num_crashes;
      change(run);
      ::_exit(0);
    }
    int status = 0;
    EXPECT_EQ(::waitpid(child, &status, 0), child);
    EXPECT_TRUE(WIFEXITED(status));
    SCOPED_TRACE(num_crashes);
    check(run);
    if (::testing::Test::HasFailure() || WEXITSTATUS(status) != kCrashed) {
      EXPECT_EQ(WEXITSTATUS(status), 0);
      return num_crashes;
    }
  }
}

// The next run begins, finds only complete checkpoints, and saves step 100 as if nothing was.
void expect_continues(const RunDirectory& run) {
  run.remove_temporaries();
  for (const int64_t step : run.steps()) text_of(run.path_of(step));
  put_checkpoint(run.temporary(100, "next"), "next");
  run.publish(100, "next");
  EXPECT_EQ(run.latest(), 100);
  EXPECT_EQ(text_of(run.path_of(100)), "next");
  for (const auto& entry : fs::directory_iterator(run.path())) {
    const std::string name = entry.path().filename().string();
    EXPECT_TRUE(name == "latest" || step_of(name).has_value()) << name;
  }
}

void publish(const RunDirectory& run) { run.publish(100, "id"); }

// Saves "new" as step 100, over what `prepare` left, and looks at the text of the latest checkpoint
// after each crash: "" for none. Both must be seen.
int publish_everywhere(const std::function<void(const RunDirectory&)>& prepare,
                       const std::string& before) {
  std::set<std::string> seen;
  const int num_crashes = crash_everywhere(
      [&](const RunDirectory& run) {
        prepare(run);
        put_checkpoint(run.temporary(100, "id"), "new");
      },
      publish,
      [&](const RunDirectory& run) {
        const std::optional<int64_t> latest = run.latest();
        const std::string text = latest ? text_of(run.path_of(*latest)) : "";
        if (latest) {
          EXPECT_EQ(text_of(resolve_checkpoint(run.path())), text);
        }
        seen.insert(text);
        expect_continues(run);
      });
  EXPECT_EQ(seen, (std::set<std::string>{before, "new"}));
  return num_crashes;
}

void save(const RunDirectory& run, int64_t step, const std::string& text) {
  put_checkpoint(run.temporary(step, "id"), text);
  run.publish(step, "id");
}

TEST(PublishCrash, LeavesTheOneBeforeOrTheNewOneAsTheLatest) {
  publish_everywhere([](const RunDirectory&) {}, "");
  // Two renames, and fsync of three directories, a file and the run's.
  EXPECT_GE(publish_everywhere([](const RunDirectory& run) { save(run, 50, "old"); }, "old"), 7);
  // In place of the latest: two more renames, their fsync, and removals.
  EXPECT_GE(publish_everywhere([](const RunDirectory& run) { save(run, 100, "old"); }, "old"), 12);
}

// A run went back from step 150 to 50, and now saves 100 in place of that of the steps it left.
TEST(PublishCrash, OfAStepThatWasGoneBackFromLeavesTheOneBeforeOrTheNewOne) {
  const auto prepare = [](const RunDirectory& run) {
    for (const int64_t step : {50, 100, 150}) save(run, step, step == 50 ? "old" : "left");
    write_file_durably(run.path() + "/latest", "step-00000050\n");
  };
  EXPECT_GE(publish_everywhere(prepare, "old"), 12);
}

TEST(PublishCrash, WhileOldOnesAreDeletedLeavesNoHalfOfOne) {
  const int num_crashes = crash_everywhere(
      [](const RunDirectory& run) {
        for (const int64_t step : {10, 20, 30}) save(run, step, "old");
        put_checkpoint(run.path() + "/step-00000010.replaced", "older");
      },
      [](const RunDirectory& run) { run.remove_old({.keep_last = 1}); },
      [](const RunDirectory& run) {
        EXPECT_EQ(run.latest(), 30);
        for (const int64_t step : run.steps()) EXPECT_EQ(text_of(run.path_of(step)), "old");
        expect_continues(run);
      });
  EXPECT_GE(num_crashes, 3 * 6);  // of three: a rename, its fsync, four files and directories
}

TEST(PublishCrash, WhileAFileIsReplacedLeavesTheOldTextOrTheNew) {
  const int num_crashes = crash_everywhere(
      [](const RunDirectory& run) { write_file_durably(run.path() + "/text", "old"); },
      [](const RunDirectory& run) { write_file_durably(run.path() + "/text", "something new"); },
      [](const RunDirectory& run) {
        const std::string text = read_text_file(run.path() + "/text", 100);
        EXPECT_TRUE(text == "old" || text == "something new") << text;
      });
  EXPECT_EQ(num_crashes, 3);  // fsync of the file, rename, fsync of the directory
}

// --- patches -------------------------------------------------------------------------------------

const StoredTensor kWeight{"a", DType::kUInt8, {300}};

// Writes a patch that sets elements [begin, end) to `value`, as one rank does.
std::string put_patch(const std::string& directory, std::optional<int64_t> from, int64_t to,
                      FlatRange range, char value) {
  const std::string path = directory + "/" + patch_name(from, to);
  const std::string temporary = directory + "/." + patch_name(from, to) + ".tmp";
  make_directories(temporary);
  const std::string values(static_cast<size_t>(range.numel()), value);
  const StoredChange change{kWeight, PositionForm::kRanges, std::as_bytes(std::span(&range, 1)),
                            std::as_bytes(std::span(values))};
  PatchRecord record{"0123456789abcdef", 0, from, to, "hf", {kWeight}, {}};
  record.files.push_back(write_patch_file(temporary, 0, {&change, 1}));
  publish_patch(temporary, path, record);
  return path;
}

void expect_readable(const std::string& patch) {
  const PatchRecord record = read_patch_record(patch);
  verify_patch_files(patch, record);
}

TEST(PublishCrash, OfAPatchLeavesAWholeOneOrNone) {
  bool sees_none = false;
  bool sees_one = false;
  const int num_crashes = crash_everywhere([](const RunDirectory&) {},
                                           [](const RunDirectory& run) {
                                             put_patch(run.path(), std::nullopt, 1, {0, 300}, 'x');
                                           },
                                           [&](const RunDirectory& run) {
                                             const std::vector<std::string> found =
                                                 patches_in(run.path());
                                             EXPECT_LE(found.size(), 1u);
                                             for (const std::string& patch : found)
                                               expect_readable(patch);
                                             (found.empty() ? sees_none : sees_one) = true;
                                           });
  EXPECT_TRUE(sees_none && sees_one);
  EXPECT_GE(num_crashes, 5);  // fsync of two files and two directories, and two renames
}

// Whatever was written of it, applying it again leads to the new weights; another one is refused.
TEST(PublishCrash, OfApplyingAPatchLeavesWeightsThatItCanBeAppliedToAgain) {
  for (const bool is_full : {false, true}) {
    const auto weights = [](const RunDirectory& run) { return run.path() + "/weights"; };
    const auto next = [&](const RunDirectory& run) {
      return run.path() + "/" + (is_full ? patch_name({}, 2) : patch_name(1, 2));
    };
    const int num_crashes = crash_everywhere(
        [&](const RunDirectory& run) {
          testing::write_plain_file(weights(run) + "/model.safetensors",
                                    {{"a", {300}, DType::kUInt8, std::string(300, '-')}});
          apply_patch(put_patch(run.path(), std::nullopt, 1, {0, 300}, 'x'), weights(run));
          put_patch(run.path(), is_full ? std::nullopt : std::optional<int64_t>(1), 2,
                    is_full ? FlatRange{0, 300} : FlatRange{100, 200}, 'y');
          put_patch(run.path(), 2, 3, {150, 160}, 'z');
        },
        [&](const RunDirectory& run) { apply_patch(next(run), weights(run)); },
        [&](const RunDirectory& run) {
          if (read_applied(weights(run))->step != 2) {
            EXPECT_THROW(apply_patch(run.path() + "/" + patch_name(2, 3), weights(run)), Error);
            apply_patch(next(run), weights(run));
          }
          apply_patch(run.path() + "/" + patch_name(2, 3), weights(run));
          const std::string text = testing::read_text(weights(run) + "/model.safetensors");
          const std::string ends(100, is_full ? 'y' : 'x');
          EXPECT_EQ(
              text.substr(text.size() - 300),
              ends + std::string(50, 'y') + std::string(10, 'z') + std::string(40, 'y') + ends);
        });
    EXPECT_GE(num_crashes, is_full ? 4 : 2);
  }
}

}  // namespace
}  // namespace fsdp::publish_crash_test
