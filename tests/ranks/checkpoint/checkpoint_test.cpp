// Saved and loaded again: the same numbers, for any ranks and strategies on both sides.
#include <gmock/gmock.h>

#include "fsdp/base/durable_file.h"
#include "fsdp/base/text.h"
#include "fsdp/checkpoint/names/name_tables.h"
#include "support/checkpoint_training.h"
#include "support/one_in.h"

namespace fsdp::testing::checkpoint_test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::UnorderedElementsAre;

Training training(const std::string& strategy, int ranks = 3, int outer = 1) {
  Training run{.ranks = ranks, .outer = outer};
  run.shard.strategy = parse_strategy(strategy);
  return run;
}

WholeState save_after(const Training& run, int steps, const std::string& directory,
                      const CheckpointerOptions& options = {}) {
  return run_training(run, [&](TrainingRank& rank) {
    rank.train(0, steps);
    save_checkpoint(directory, rank.state(), {.step = steps}, options);
  });
}

WholeState load_into(const Training& run, const std::string& directory) {
  return run_training(run, [&](TrainingRank& rank) { load_checkpoint(directory, rank.state()); });
}

TEST(Checkpoint, TenStepsAreFiveSavedAndFiveMore) {
  OneIn part(3);
  for (const std::string& strategy : kStrategies)
    for (const at::ScalarType compute : {at::kFloat, at::kBFloat16})
      for (const SaveMode mode : {SaveMode::kBlocking, SaveMode::kBackground}) {
        if (part.skips()) continue;
        Training run = training(strategy, 4, 2);
        run.compute = compute;
        const TempDir directory;
        const WholeState straight =
            run_training(run, [](TrainingRank& rank) { rank.train(0, 10); });
        run_training(run, [&](TrainingRank& rank) {
          Checkpointer checkpointer(directory.path(), rank.mesh, {.mode = mode});
          rank.train(0, 5);
          checkpointer.save(rank.state(), {.step = 5, .schedule = "s", .data = "d"});
          rank.train(5, 7);  // the load must undo these steps
          checkpointer.wait();
        });
        const WholeState resumed = run_training(run, [&](TrainingRank& rank) {
          Checkpointer checkpointer(directory.path(), rank.mesh);
          const auto loaded = checkpointer.load_latest(rank.state());
          ASSERT_TRUE(loaded.has_value());
          EXPECT_EQ(loaded->step, 5);
          EXPECT_EQ(loaded->schedule, "s");
          EXPECT_EQ(loaded->data, "d");
          EXPECT_EQ(rank.optimizer.state().step, 5);
          rank.train(5, 10);
        });
        expect_same_state(resumed, straight, strategy + " " + c10::toString(compute));
      }
}

TEST(Checkpoint, LoadsOnAnyNumberOfRanksWhateverWroteIt) {
  OneIn part(7);
  for (const std::string& from : kStrategies)
    for (const int writers : {1, 6}) {
      const TempDir directory;
      const WholeState saved =
          save_after(training(from, writers, writers == 6 ? 2 : 1), 2, directory.path());
      for (const int ranks : {1, 2, 3, 8})
        for (const std::string& to : kStrategies)
          for (const int outer : {1, 2}) {
            if (ranks % outer != 0 || part.skips()) continue;
            expect_same_state(
                load_into(training(to, ranks, outer), directory.path()), saved,
                concat(from, " of ", writers, " to ", to, " of ", ranks, ", outer ", outer));
          }
    }
}

TEST(Checkpoint, LoadsIntoOtherPoolsGranularitiesAndMemory) {
  const TempDir directory;
  Training run = training("optim_grads_params", 3);
  run.compute = at::kBFloat16;
  const WholeState saved = save_after(run, 3, directory.path());
  for (const Granularity granularity :
       {Granularity::row(), Granularity::tensor(), Granularity::block(4)})
    for (const double fraction : {0.0, 0.37, 1.0})
      for (const MainStorage storage : {MainStorage::kSplit, MainStorage::kSeparate}) {
        Training other = training("optim_grads", 2);
        other.compute = at::kBFloat16;
        other.shard.granularity = granularity;
        other.shard.offload.fraction = fraction;
        other.shard.precision.main_storage = storage;
        other.shard.pool = PoolKind::kOnDemand;
        expect_same_state(load_into(other, directory.path()), saved,
                          concat(to_text(granularity), " ", fraction));
      }
  // fp32 weights have the main weights' values; bf16 ones without main weights are rounded.
  expect_same_state(load_into(training("optim", 2), directory.path()), saved, "fp32");
  Training narrow = training("optim", 2);
  narrow.compute = at::kBFloat16;
  narrow.shard.precision.main_params = at::kBFloat16;
  const WholeState loaded = load_into(narrow, directory.path());
  EXPECT_EQ(loaded.at("unit0.linear.weight").scalar_type(), at::kBFloat16);
  EXPECT_TRUE(at::allclose(loaded.at("unit0.linear.weight").to(at::kFloat),
                           saved.at("unit0.linear.weight"), 1.0 / 256, 0.0));
}

TEST(Checkpoint, KeepsNarrowMomentsExactly) {
  for (const at::ScalarType moment : {at::kBFloat16, at::kHalf, at::kFloat8_e4m3fn}) {
    const TempDir directory;
    Training run = training("optim_grads_params", 2);
    run.adamw.first_moment = moment;
    run.adamw.second_moment = moment;
    run.shard.offload.fraction = 0.5;
    const WholeState straight = run_training(run, [](TrainingRank& rank) { rank.train(0, 6); });
    save_after(run, 3, directory.path());
    const WholeState resumed = run_training(run, [&](TrainingRank& rank) {
      rank.train(0, 1);  // so that there are values to replace
      load_checkpoint(directory.path(), rank.state());
      rank.train(3, 6);
    });
    expect_same_state(resumed, straight, c10::toString(moment));
  }
}

TEST(Checkpoint, IsWrittenOnceWhereRanksHaveTheSame) {
  const TempDir directory;
  save_after(training("no_shard", 4), 1, directory.path());
  int64_t bytes = 0;
  for (const char* folder : {"/step-00000001/model/", "/step-00000001/optimizer/"})
    for (const std::string& name : names_in(directory.path() + folder))
      bytes += FileReader(directory.path() + folder + name).bytes();
  // 3 numbers of 4 bytes for each parameter, and headers of at most 4 KiB for 4 ranks' 2 files.
  const int64_t numel = 20 * 23 + 24 * 27 + 28 * 31 + 32 * 3;
  EXPECT_GE(bytes, 12 * numel);
  EXPECT_LE(bytes, 12 * numel + 8 * 4096);
}

// One matrix of a million elements: enough for several ranks to share.
struct BigImpl : torch::nn::Module {
  at::Tensor forward(const at::Tensor& x) { return unit(x); }
  Unit<torch::nn::Linear> unit = register_module("unit", Unit<torch::nn::Linear>(900, 1100));
};
TORCH_MODULE(Big);

WholeState run_big(const Training& run, const std::function<void(const CheckpointState&)>& body) {
  StateCollector collector;
  run_ranks(run.ranks, [&](World& world) {
    const Mesh mesh = world.mesh({.outer = run.outer});
    Big model = build([] { return Big(); });
    const Sharded sharded = fully_shard(model, mesh, run.shard);
    AdamW optimizer(sharded, {.lr = 0.01});
    model(input_for(world.rank(), 0, {2, 900})).square().sum().backward();
    optimizer.step();
    optimizer.zero_grad();
    body({.sharded = sharded, .optimizer = &optimizer});
    collector.add(sharded, optimizer);
  });
  return collector.take();
}

TEST(Checkpoint, RanksThatHaveTheSameShareTheWritingOfLargeTensors) {
  const std::vector<Training> runs = {training("no_shard", 3), training("optim_grads_params", 4, 2),
                                      training("optim_grads_params", 2, 2)};
  for (const Training& run : runs) {
    const TempDir directory;
    const WholeState saved = run_big(run, [&](const CheckpointState& state) {
      save_checkpoint(directory.path(), state, {.step = 1});
    });
    const int64_t whole_bytes = int64_t{4} * 901 * 1100;
    const std::string folder = directory / "step-00000001/model";
    std::map<std::string, int64_t> bytes_of_rank;
    for (const std::string& name : names_in(folder))
      bytes_of_rank[name.substr(0, 5)] += FileReader(concat(folder, "/", name)).bytes();
    EXPECT_EQ(bytes_of_rank.size(), static_cast<size_t>(run.ranks));
    for (const auto& [rank, bytes] : bytes_of_rank)
      EXPECT_GT(bytes, whole_bytes / run.ranks / 2) << rank << " of " << run.ranks;
    expect_same_state(
        run_big(training("optim_grads", 3),
                [&](const CheckpointState& state) { load_checkpoint(directory.path(), state); }),
        saved, concat(run.ranks, " ranks"));
  }
}

TEST(Checkpoint, RefusesWhatDoesNotFitBeforeAnythingChanges) {
  const TempDir directory;
  save_after(training("optim_grads_params", 2), 1, directory.path());
  run_ranks(2, [&](World& world) {
    const Mesh mesh = world.mesh({});
    Wide larger = make_wide(at::kFloat, kUnits + 1);
    const Sharded sharded = fully_shard(larger, mesh, {});
    const std::vector<at::Tensor> before = weights_of(sharded, larger);
    const std::string error =
        error_of([&] { load_checkpoint(directory.path(), {.sharded = sharded}); });
    // The last unit of the smaller model ends with 3.
    EXPECT_THAT(error, AllOf(HasSubstr("it lacks 'unit4.linear.weight', 'unit4.linear.bias'"),
                             HasSubstr("allow_missing"),
                             HasSubstr("unit3.linear.weight [3, 31] instead of [35, 31]")));
    expect_equal(weights_of(sharded, larger), before);
  });
}

TEST(Checkpoint, LoadsWhatIsAllowedToBeMissingOrExtra) {
  // Stored under another name, a parameter is missing and that name is one too many.
  const std::string name = "unit0.linear.bias";
  const NameRules renamed = parse_name_rules(
      R"({"rules": [{"pattern": "unit0.linear.bias", "rename": "renamed.bias"}]})", "test");
  for (const at::ScalarType compute :
       {at::kFloat, at::kBFloat16})  // in place, and by way of chunks
    for (const int ranks : {1, 3}) {
      const TempDir directory;
      Training run = training("optim_grads_params", ranks);
      run.compute = compute;
      const WholeState saved = save_after(run, 2, directory.path(), {.form = {.names = renamed}});
      WholeState expected = saved;
      const WholeState kept = run_training(run, [](TrainingRank& rank) { rank.train(5, 6); });
      for (const char* part : {"", ".exp_avg", ".exp_avg_sq"})
        expected[name + part] = kept.at(name + part);
      const WholeState loaded = run_training(run, [&](TrainingRank& rank) {
        rank.train(5, 6);
        LoadOptions options;
        EXPECT_THAT(error_of([&] { load_checkpoint(directory.path(), rank.state(), options); }),
                    AllOf(HasSubstr("it lacks 'unit0.linear.bias'"),
                          HasSubstr("it also has 'renamed.bias'")));
        options.allow_missing = {"unit0.linear.bias*"};
        EXPECT_THAT(error_of([&] { load_checkpoint(directory.path(), rank.state(), options); }),
                    HasSubstr("it also has 'renamed.bias'"));
        options.extra = LoadOptions::Extra::kAllow;
        const LoadedCheckpoint report = load_checkpoint(directory.path(), rank.state(), options);
        EXPECT_THAT(report.missing,
                    UnorderedElementsAre(name, name + ".exp_avg", name + ".exp_avg_sq"));
        EXPECT_EQ(report.extra.size(), 3);
        options.extra = LoadOptions::Extra::kRefuse;
        options.ignored = {"renamed.*"};
        EXPECT_TRUE(load_checkpoint(directory.path(), rank.state(), options).extra.empty());
      });
      expect_same_state(loaded, expected, concat(c10::toString(compute), " ", ranks));
      EXPECT_FALSE(at::equal(expected.at(name), saved.at(name))) << "the test proves nothing";
    }
}

TEST(Checkpoint, RestoresBuffers) {
  const TempDir directory;
  const at::Tensor mean = at::arange(12, at::kDouble).view({3, 4});
  const at::Tensor count = at::full({}, 17, at::kLong);
  const at::Tensor nothing = at::empty({0, 3});
  run_training(training("optim", 3), [&](TrainingRank& rank) {
    CheckpointState state = rank.state();
    state.buffers = {{"mean", mean}, {"count", count}, {"nothing", nothing}};
    save_checkpoint(directory.path(), state, {.step = 0});
  });
  run_training(training("optim_grads_params", 2), [&](TrainingRank& rank) {
    CheckpointState state = rank.state();
    const at::Tensor mean_loaded = at::zeros({3, 4}, at::kDouble);
    const at::Tensor count_loaded = at::zeros({}, at::kLong);
    state.buffers = {
        {"mean", mean_loaded}, {"count", count_loaded}, {"nothing", at::empty({0, 3})}};
    load_checkpoint(directory.path(), state);
    EXPECT_TRUE(at::equal(mean_loaded, mean));
    EXPECT_TRUE(at::equal(count_loaded, count));
    state.buffers[1].value = at::zeros({}, at::kFloat);
    EXPECT_THAT(error_of([&] { load_checkpoint(directory.path(), state); }),
                HasSubstr("other types have 'count int64 instead of fp32'"));
  });
}

TEST(Checkpoint, GoesOnWithTheSameRandomNumbers) {
  const TempDir directory;
  at::Tensor expected;
  run_training(training("optim", 1), [&](TrainingRank& rank) {
    torch::manual_seed(3);
    at::rand({5});
    save_checkpoint(directory.path(), rank.state(), {.step = 1});
    expected = at::rand({7});
  });
  run_training(training("optim", 1), [&](TrainingRank& rank) {
    EXPECT_TRUE(load_checkpoint(directory.path(), rank.state()).has_random_state);
    EXPECT_TRUE(at::equal(at::rand({7}), expected));
  });
  run_training(training("optim", 2), [&](TrainingRank& rank) {
    EXPECT_FALSE(load_checkpoint(directory.path(), rank.state()).has_random_state);
  });
}

TEST(Checkpoint, WeightsAloneNeedNoMoments) {
  const TempDir directory;
  const WholeState saved = save_after(training("optim_grads_params", 2), 2, directory.path());
  run_ranks(1, [&](World& world) {
    const Mesh mesh = world.mesh({});
    Wide model = make_wide();
    const Sharded sharded = fully_shard(model, mesh, {});
    load_checkpoint(directory.path(), {.sharded = sharded});
    for (const ShardedParameter& each : sharded.parameters())
      EXPECT_TRUE(at::equal(each.main_weight.cpu(), saved.at(each.name).view({-1}))) << each.name;
  });
}

}  // namespace
}  // namespace fsdp::testing::checkpoint_test
