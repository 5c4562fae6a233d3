// A run that saves repeatedly: visible checkpoints, retention, and failures.
#include <gmock/gmock.h>

#include <algorithm>
#include <chrono>
#include <fstream>
#include <thread>

#include "fsdp/base/durable_file.h"
#include "fsdp/checkpoint/format/tensor_catalog.h"
#include "fsdp/checkpoint/rank_agreement.h"
#include "fsdp/checkpoint/run_directory.h"
#include "fsdp/comm/communicator.h"
#include "support/checkpoint_training.h"
#include "support/file_size_limit.h"

namespace fsdp::testing::checkpointer_test {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;

Training training(int ranks = 2, const std::string& strategy = "optim_grads_params") {
  Training run{.ranks = ranks};
  run.shard.strategy = parse_strategy(strategy);
  return run;
}

std::vector<std::string> sorted_names_in(const std::string& directory) {
  std::vector<std::string> names = names_in(directory);
  std::sort(names.begin(), names.end());
  return names;
}

TEST(Checkpointer, ABackgroundSaveIsVisibleWithoutAnotherCall) {
  const TempDir directory;
  run_training(training(3), [&](TrainingRank& rank) {
    Checkpointer checkpointer(directory.path(), rank.mesh);
    rank.train(0, 1);
    checkpointer.save(rank.state(), {.step = 1});
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(60);
    while (RunDirectory(directory.path()).latest() != 1 &&
           std::chrono::steady_clock::now() < deadline)
      std::this_thread::yield();
    EXPECT_EQ(RunDirectory(directory.path()).latest(), 1);
    checkpointer.wait();
  });
  EXPECT_THAT(sorted_names_in(directory.path()), ElementsAre("latest", "step-00000001"));
}

TEST(Checkpointer, ABackgroundSaveIsOfTheMomentItWasAskedFor) {
  const TempDir directory;
  Training run = training(2);
  run.shard.offload.fraction = 0.5;
  const WholeState then = run_training(run, [](TrainingRank& rank) { rank.train(0, 3); });
  run_training(run, [&](TrainingRank& rank) {
    Checkpointer checkpointer(directory.path(), rank.mesh);
    rank.train(0, 3);
    checkpointer.save(rank.state(), {.step = 3});
    rank.train(3, 20);
    checkpointer.wait();
  });
  expect_same_state(
      run_training(run,
                   [&](TrainingRank& rank) { load_checkpoint(directory.path(), rank.state()); }),
      then, "snapshot");
}

TEST(Checkpointer, AProgramThatEndsWithoutWaitingLosesNothing) {
  const TempDir directory;
  run_training(training(3), [&](TrainingRank& rank) {
    Checkpointer checkpointer(directory.path(), rank.mesh);
    checkpointer.save(rank.state(), {.step = 4});
  });
  EXPECT_EQ(RunDirectory(directory.path()).latest(), 4);
}

TEST(Checkpointer, KeepsWhatRetentionSays) {
  const TempDir directory;
  run_training(training(2), [&](TrainingRank& rank) {
    Checkpointer checkpointer(directory.path(), rank.mesh,
                              {.keep = {.keep_last = 2, .keep_every = 4}});
    for (int step = 1; step <= 7; ++step) {
      rank.train(step - 1, step);
      checkpointer.save(rank.state(), {.step = step});
    }
    checkpointer.wait();
  });
  EXPECT_THAT(RunDirectory(directory.path()).steps(), ElementsAre(4, 6, 7));
}

TEST(Checkpointer, TellsRankZeroWhatHasBecomeVisible) {
  const TempDir directory;
  run_training(training(2), [&](TrainingRank& rank) {
    Checkpointer checkpointer(directory.path(), rank.mesh);
    EXPECT_THAT(checkpointer.take_saved(), IsEmpty());
    checkpointer.save(rank.state(), {.step = 3});
    checkpointer.wait();
    const std::vector<SavedCheckpoint> saved = checkpointer.take_saved();
    EXPECT_THAT(checkpointer.take_saved(), IsEmpty());
    if (rank_in(rank.mesh) != 0) {
      EXPECT_THAT(saved, IsEmpty());
      return;
    }
    ASSERT_EQ(saved.size(), 1U);
    EXPECT_EQ(saved[0].step, 3);
    EXPECT_EQ(saved[0].path, RunDirectory(directory.path()).path_of(3));
    EXPECT_GT(saved[0].bytes, 0);
    EXPECT_GT(saved[0].seconds, 0);
  });
}

TEST(Checkpointer, NeverDeletesWhatTheRunWasLoadedFrom) {
  const TempDir directory;
  run_training(training(2), [&](TrainingRank& rank) {
    save_checkpoint(directory.path(), rank.state(), {.step = 1});
    Checkpointer checkpointer(directory.path(), rank.mesh,
                              {.mode = SaveMode::kBlocking, .keep = {.keep_last = 1}});
    EXPECT_TRUE(checkpointer.load_latest(rank.state()).has_value());
    for (int step = 2; step <= 4; ++step) checkpointer.save(rank.state(), {.step = step});
  });
  EXPECT_THAT(RunDirectory(directory.path()).steps(), ElementsAre(1, 4));
}

TEST(Checkpointer, ThereMayBeNoneYet) {
  const TempDir directory;
  run_training(training(2), [&](TrainingRank& rank) {
    Checkpointer checkpointer(directory / "new/run", rank.mesh);
    EXPECT_FALSE(checkpointer.load_latest(rank.state()).has_value());
    EXPECT_THAT(error_of([&] { checkpointer.save(rank.state(), {.step = -1}); }),
                HasSubstr("position.step is -1"));
  });
}

// Each part of a checkpoint in turn, of a file that only one rank reads as well.
TEST(Checkpointer, GoesOnFromTheOneBeforeADamagedOne) {
  const Training run = training(2);
  WholeState older;
  for (const std::string file : {"manifest.json", "config.json", "ranks/00001.json",
                                 "model/00001-0.safetensors", "optimizer/00000-0.safetensors"}) {
    const TempDir directory;
    run_training(run, [&](TrainingRank& rank) {
      rank.train(0, 1);
      const CheckpointerOptions saving{.model_config = std::string(50, ' ')};
      save_checkpoint(directory.path(), rank.state(), {.step = 1}, saving);
      rank.train(1, 2);
      save_checkpoint(directory.path(), rank.state(), {.step = 2}, saving);
    });
    const std::string path = directory / "step-00000002/" + file;
    std::fstream bytes(path, std::ios::in | std::ios::out | std::ios::binary);
    bytes.seekp(-40, std::ios::end).put('#');
    bytes.close();
    const WholeState loaded = run_training(run, [&](TrainingRank& rank) {
      const std::string error =
          error_of([&] { load_checkpoint(directory / "step-00000002", rank.state()); });
      EXPECT_EQ(error.empty(), file == "config.json") << error;  // which loading does not read
      Checkpointer checkpointer(directory.path(), rank.mesh);
      const auto found = checkpointer.load_latest(rank.state());
      ASSERT_TRUE(found.has_value()) << file;
      EXPECT_EQ(found->step, 1) << file;
    });
    EXPECT_EQ(TensorCatalog(directory / "step-00000001").model_config(), std::string(50, ' '));
    if (older.empty()) older = run_training(run, [](TrainingRank& rank) { rank.train(0, 1); });
    expect_same_state(loaded, older, file);
    const bool is_seen_without_reading = file == "manifest.json" || file == "config.json";
    EXPECT_EQ(resolve_checkpoint(directory.path()),
              directory / (is_seen_without_reading ? "step-00000001" : "step-00000002"));
  }
}

// A model that does not fit is no damage: the checkpoint before fits no better.
TEST(Checkpointer, DoesNotGoBackForAnotherModel) {
  const TempDir directory;
  run_training(training(2), [&](TrainingRank& rank) {
    for (const int step : {1, 2}) save_checkpoint(directory.path(), rank.state(), {.step = step});
    const std::vector<NamedBuffer> buffers = {{"other", at::zeros({3})}};
    Checkpointer checkpointer(directory.path(), rank.mesh);
    const CheckpointState other{.sharded = rank.sharded, .buffers = buffers};
    EXPECT_THAT(error_of([&] { checkpointer.load_latest(other); }),
                AllOf(HasSubstr("step-00000002"), HasSubstr("other")));
  });
}

TEST(Checkpointer, SavesTheSameStepAgain) {
  const TempDir directory;
  const WholeState last = run_training(training(2), [&](TrainingRank& rank) {
    Checkpointer checkpointer(directory.path(), rank.mesh);
    for (int i = 0; i < 20; ++i) checkpointer.save(rank.state(), {.step = 1});
    rank.train(0, 2);
    checkpointer.save(rank.state(), {.step = 1});
    checkpointer.wait();
  });
  EXPECT_THAT(sorted_names_in(directory.path()), ElementsAre("latest", "step-00000001"));
  expect_same_state(
      run_training(training(2),
                   [&](TrainingRank& rank) { load_checkpoint(directory.path(), rank.state()); }),
      last, "again");
}

// --- failures ---

TEST(Checkpointer, AFullDiskIsOneSentenceAndTrainingGoesOn) {
  for (const SaveMode mode : {SaveMode::kBlocking, SaveMode::kBackground}) {
    const TempDir directory;
    const WholeState last = run_training(training(2), [&](TrainingRank& rank) {
      Checkpointer checkpointer(directory.path(), rank.mesh, {.mode = mode});
      rank.train(0, 1);
      checkpointer.save(rank.state(), {.step = 1});
      checkpointer.wait();
      rank.world.communicator().barrier("before").wait();
      std::optional<FileSizeLimit> full;
      if (rank.world.rank() == 0) full.emplace(600);  // of the process: for all ranks
      rank.world.communicator().barrier("full").wait();
      rank.train(1, 2);
      const std::string error = error_of([&] {
        checkpointer.save(rank.state(), {.step = 2});
        checkpointer.wait();
      });
      EXPECT_THAT(error, HasSubstr("safetensors")) << "rank " << rank.world.rank();
      EXPECT_EQ(std::count(error.begin(), error.end(), '\n'), 0);
      rank.world.communicator().barrier("seen").wait();
      full.reset();
      rank.world.communicator().barrier("room again").wait();
      EXPECT_EQ(RunDirectory(directory.path()).latest(), 1);
      EXPECT_THAT(RunDirectory(directory.path()).steps(), ElementsAre(1));
      rank.train(2, 3);
      checkpointer.save(rank.state(), {.step = 3});
      checkpointer.wait();
    });
    EXPECT_THAT(sorted_names_in(directory.path()),
                ElementsAre("latest", "step-00000001", "step-00000003"));
    expect_same_state(
        run_training(training(3),
                     [&](TrainingRank& rank) { load_checkpoint(directory.path(), rank.state()); }),
        last, "after a full disk");
  }
}

TEST(Checkpointer, OneRankThatCannotWriteFailsTheSaveOnAll) {
  const TempDir directory;
  run_training(training(3), [&](TrainingRank& rank) {
    Checkpointer checkpointer(directory.path(), rank.mesh, {.mode = SaveMode::kBlocking});
    checkpointer.save(rank.state(), {.step = 1});
    // A data position that is not text cannot be written; only one rank has one.
    const std::string position = rank.world.rank() == 1 ? "\xff" : "";
    const std::string error =
        error_of([&] { checkpointer.save(rank.state(), {.step = 2, .data = position}); });
    EXPECT_THAT(error, HasSubstr("not UTF-8"));
    EXPECT_EQ(error.find("saving the checkpoint of step 2 failed on rank 1: ") == 0,
              rank.world.rank() != 1);
    EXPECT_EQ(RunDirectory(directory.path()).latest(), 1);
    checkpointer.save(rank.state(), {.step = 3});
  });
  EXPECT_THAT(sorted_names_in(directory.path()),
              ElementsAre("latest", "step-00000001", "step-00000003"));
}

TEST(Checkpointer, AnErrorInTheBackgroundSurfacesAtTheNextCall) {
  const TempDir directory;
  run_training(training(2), [&](TrainingRank& rank) {
    Checkpointer checkpointer(directory.path(), rank.mesh);
    checkpointer.save(rank.state(), {.step = 1, .data = "\xff"});
    EXPECT_THAT(error_of([&] { checkpointer.save(rank.state(), {.step = 2}); }),
                HasSubstr("not UTF-8"));
    checkpointer.wait();  // the second one was begun nevertheless
    EXPECT_EQ(RunDirectory(directory.path()).latest(), 2);
  });
}

TEST(Checkpointer, AVanishedDirectoryIsAnErrorAndComesBack) {
  const TempDir directory;
  run_training(training(2), [&](TrainingRank& rank) {
    Checkpointer checkpointer(directory / "run", rank.mesh, {.mode = SaveMode::kBlocking});
    checkpointer.save(rank.state(), {.step = 1});
    rank.world.communicator().barrier("saved").wait();
    if (rank.world.rank() == 0) {
      remove_tree(directory / "run");
      std::ofstream(directory / "run") << "a file in its place";
    }
    rank.world.communicator().barrier("gone").wait();
    EXPECT_THAT(error_of([&] { checkpointer.save(rank.state(), {.step = 2}); }),
                HasSubstr(directory / "run"));
    rank.world.communicator().barrier("seen").wait();
    if (rank.world.rank() == 0) remove_tree(directory / "run");
    rank.world.communicator().barrier("room").wait();
    checkpointer.save(rank.state(), {.step = 3});
  });
  EXPECT_EQ(RunDirectory(directory / "run").latest(), 3);
}

TEST(Checkpointer, ADirectoryThatCannotBeIsRefusedOnAllRanks) {
  const TempDir directory;
  std::ofstream(directory / "file") << "text";
  run_ranks(3, [&](World& world) {
    const Mesh mesh = world.mesh({});
    const std::string error = error_of([&] { Checkpointer(directory / "file/run", mesh); });
    EXPECT_THAT(error, HasSubstr("file/run"));
    EXPECT_EQ(error.find("opening the directory of checkpoints failed on rank 0: ") == 0,
              world.rank() != 0);
  });
}

// A rank that fails with the others tells why, though they have ended before it.
TEST(Checkpointer, TheErrorOfARunIsThatOfTheRankThatFailed) {
  const TempDir directory;
  std::ofstream(directory / "file") << "text";
  const auto run = [&](World& world) {
    const Mesh mesh = world.mesh({.outer = 2});
    try {
      Checkpointer(directory / "file/run", mesh);
    } catch (const Error&) {
      while (world.rank() == 0 && !a_rank_has_failed(mesh)) std::this_thread::yield();
      throw;
    }
  };
  for (int i = 0; i < 3; ++i) {
    const std::string error = error_of([&] { run_ranks(4, run); });
    EXPECT_THAT(error, HasSubstr("file/run"));
    EXPECT_THAT(error, Not(HasSubstr("failed on rank")));
  }
}

// A rank that is gone writes no more, so the others do not wait a minute for its part.
TEST(Checkpointer, DoesNotWaitForARankThatIsGone) {
  const TempDir directory;
  std::atomic<bool> has_ended = false;
  const auto run = [&](TrainingRank& rank) {
    auto checkpointer = std::make_unique<Checkpointer>(directory.path(), rank.mesh);
    if (rank.world.rank() == 1) {
      rank.world.communicator().abort("rank 1 is gone");
      const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(50);
      while (!has_ended && std::chrono::steady_clock::now() < deadline) std::this_thread::yield();
      EXPECT_TRUE(has_ended);
      return;
    }
    checkpointer->save(rank.state(), {.step = 1});
    checkpointer.reset();
    has_ended = true;
  };
  error_of([&] { run_training(training(2), run); });
}

TEST(Checkpointer, DamageIsFoundByEveryRankThatReadsIt) {
  const TempDir directory;
  run_training(training(2), [&](TrainingRank& rank) {
    save_checkpoint(directory.path(), rank.state(), {.step = 1});
  });
  const std::string path = directory / "step-00000001/optimizer/00001-0.safetensors";
  std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
  file.seekp(-3, std::ios::end);
  file.put('\x55');
  file.close();
  run_training(training(2), [&](TrainingRank& rank) {
    EXPECT_THAT(error_of([&] { load_checkpoint(directory.path(), rank.state()); }),
                rank.world.rank() == 1
                    ? AllOf(HasSubstr(path), HasSubstr("are not what was written"))
                    : AllOf(HasSubstr("reading the checkpoint failed on rank 1"), HasSubstr("")));
  });
}

// --- what it costs ---

TEST(Checkpointer, NeedsABarrierAndOneNumberOfEachRank) {
  for (const int outer : {1, 2})
    for (const int rank : {0, 3}) {
      const TempDir directory;
      const auto recording = std::make_shared<Recording>();
      World world = World::simulated(rank, 4, recording);
      const Mesh mesh = world.mesh({.outer = outer});
      Wide model = make_wide();
      const Sharded sharded = fully_shard(model, mesh, training().shard);
      AdamW optimizer(sharded, {});
      Checkpointer checkpointer(directory.path(), mesh, {.mode = SaveMode::kBlocking});
      recording->clear();
      // The other ranks are not there, so rank 0 has nothing to publish, and tells them.
      EXPECT_THAT(error_of([&] {
                    checkpointer.save({.sharded = sharded, .optimizer = &optimizer}, {.step = 1});
                  }),
                  rank == 0 ? HasSubstr("was not saved") : HasSubstr(""));
      const auto axes = static_cast<size_t>(outer);
      ASSERT_GE(recording->size(), 2 * axes);
      EXPECT_EQ(recording->size() > 2 * axes, rank == 0);
      for (size_t i = 0; i < 2 * axes; ++i)
        EXPECT_EQ((*recording)[i].print.kind, i < axes ? OpKind::kBarrier : OpKind::kAllReduce);
    }
}

TEST(Checkpointer, ARankReadsOnlyItsPart) {
  const TempDir directory;
  // Blocks of 64 bytes, so that few unwanted bytes must be read.
  const CheckpointerOptions options{.write = {.chunk_bytes = 256, .block_bytes = 64}};
  run_training(training(4), [&](TrainingRank& rank) {
    save_checkpoint(directory.path(), rank.state(), {.step = 1}, options);
  });
  for (const int ranks : {1, 2, 4, 8}) {
    std::atomic<int64_t> bytes = 0;
    run_training(training(ranks), [&](TrainingRank& rank) {
      const LoadedCheckpoint loaded = load_checkpoint(directory.path(), rank.state());
      int64_t wanted = 0;
      int64_t stretches = 0;
      for (const ShardedParameter& each : rank.sharded.parameters()) {
        wanted += 12 * each.main_weight.numel();
        // A parameter comes in as many parts as there were ranks, of at most 3 boxes each.
        stretches += each.main_weight.numel() > 0 ? 3 * (1 + 3 * 4 / ranks) : 0;
      }
      EXPECT_LE(loaded.statistics.bytes, wanted + 2 * 64 * stretches) << ranks;
      EXPECT_GE(loaded.statistics.bytes, wanted);
      bytes += loaded.statistics.bytes;
    });
    EXPECT_GT(bytes, 0);
  }
}

}  // namespace
}  // namespace fsdp::testing::checkpointer_test
