// Streams of patches in a directory: what follows a failure, a stream before, and old ones.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "fsdp/base/durable_file.h"
#include "fsdp/checkpoint/patches.h"
#include "fsdp/checkpoint/patches/patch_files.h"
#include "support/checkpoint_training.h"
#include "support/error_of.h"
#include "support/parallel_training.h"
#include "support/temp_dir.h"

namespace fsdp::testing::patch_streams_test {
namespace {

using ::testing::HasSubstr;

Training two_ranks() {
  Training run{.ranks = 2, .compute = at::kBFloat16};
  run.adamw = {.lr = 1e-5, .step = {.marks_changes = true}};
  return run;
}

// On all ranks, with one sentence; receivers have missed a patch, so the next one is full.
TEST(PatchStreams, AfterAFailedWriteAreFull) {
  const TempDir directory;
  run_training(two_ranks(), [&](TrainingRank& rank) {
    PatchStream stream(rank.state());
    stream.write(directory.path(), 0);
    rank.train(0, 1);
    const std::string file = directory.path() + "/patch-full-00000000/patch.json";
    EXPECT_THAT(error_of([&] { stream.write(file, 1); }), rank.world.rank() == 0
                                                              ? HasSubstr("Not a directory")
                                                              : HasSubstr("failed on rank 0: "));
    EXPECT_THAT(stream.write(directory.path(), 2), HasSubstr("/patch-full-00000002"));
  });
}

// A run that was resumed comes to the same steps again, in another stream.
TEST(PatchStreams, TakeThePlaceOfThoseOfAStreamBefore) {
  const TempDir directory;
  for (int i = 0; i < 2; ++i)
    run_training(two_ranks(), [&](TrainingRank& rank) {
      PatchStream stream(rank.state());
      stream.write(directory.path(), 0);
      rank.train(0, 1);
      if (i == 0) rank.train(1, 2);
      const std::string path = stream.write(directory.path(), 2 - i);
      EXPECT_EQ(read_patch_record(path).base,
                read_patch_record(directory.path() + "/patch-full-00000000").base);
    });
  const PatchRecord first = read_patch_record(directory.path() + "/patch-00000000-00000002");
  const PatchRecord second = read_patch_record(directory.path() + "/patch-00000000-00000001");
  EXPECT_NE(first.base, second.base);
  EXPECT_GT(second.begun, first.begun);  // within one second, and if this host's clock is behind
  EXPECT_EQ(names_in(directory.path()).size(), 3u);
}

TEST(PatchStreams, ThatAreKeptLeadOnFromTwoFullOnes) {
  const TempDir directory;
  run_training(two_ranks(), [&](TrainingRank& rank) {
    PatchStream stream(rank.state(), {.keep = 2});
    for (int step = 0; step < 7; ++step) {
      stream.write(directory.path(), step);
      rank.train(step, step + 1);
    }
  });
  std::vector<std::string> names;
  for (const std::string& path : patches_in(directory.path())) names.push_back(file_name_of(path));
  EXPECT_EQ(names, (std::vector<std::string>{"patch-full-00000004", "patch-00000004-00000005",
                                             "patch-full-00000006", "patch-00000005-00000006"}));
}

// It fails at the first tensor, when other marks may be gone. All ranks learn of it, or else marks
// of some would be gone where others bring theirs.
TEST(PatchStreams, AfterOneThatFailedOnOneRankAreFull) {
  run_training(two_ranks(), [&](TrainingRank& rank) {
    PatchStream stream(rank.state());
    stream.take(0);
    rank.train(0, 1);
    const c10::Device where =
        rank.world.rank() == 1 ? c10::Device(at::kCUDA, 99) : c10::Device(at::kCPU);
    EXPECT_THROW(stream.take(1, where), std::exception);
    EXPECT_FALSE(stream.take(1).from.has_value());
  });
}

}  // namespace
}  // namespace fsdp::testing::patch_streams_test
