// Checkpoints do not see which ranks shared out tensors and experts: any mesh loads any other's.
#include <gmock/gmock.h>

#include "fsdp/checkpoint/checkpointer.h"
#include "fsdp/checkpoint/load.h"
#include "fsdp/checkpoint/names/name_rules.h"
#include "support/parallel_training.h"
#include "support/temp_dir.h"

namespace fsdp::testing::parallel_checkpoint_test {
namespace {

using ::testing::HasSubstr;
using namespace parallel;

const std::vector<Grids>& meshes() {
  static const std::vector<Grids> all = {{1, {}},
                                         {2, {.tp = 2}},
                                         {4, {.tp = 4}},
                                         {4, {.outer = 2, .tp = 2}},
                                         {4, {.ep = 4, .tp = 2}},
                                         {4, {.outer = 2, .ep = 2}},
                                         {8, {.outer = 2, .ep = 2, .tp = 2}}};
  return all;
}

using Body = std::function<void(ParallelModel&, const Mesh&, const CheckpointState&)>;

void with_model(const Grids& grids, const Body& body, const ShardOptions& options = {}) {
  run_ranks(grids.ranks, [&](World& world) {
    const Mesh mesh = world.mesh(grids.mesh);
    ParallelModel model = parallel_model();
    const Sharded sharded = fully_shard(model, mesh, options);
    AdamW optimizer(sharded, kParallelAdamW);
    body(model, mesh, {.sharded = sharded, .optimizer = &optimizer});
  });
}

// The same batch for every loss: the mean of any number of them is the same.
void train(ParallelModel& model, const CheckpointState& state, int first, int last) {
  for (int step = first; step < last; ++step) {
    loss_of(model, 0, step).backward();
    state.optimizer->step();
    state.optimizer->zero_grad();
  }
}

Named whole_weights(ParallelModel& model, const Sharded& sharded) {
  Named weights;
  const auto whole = sharded.full_parameters();
  for (const auto& item : model->named_parameters())
    weights[item.key()] = item.value().detach().clone();
  return weights;
}

// Weights bit for bit. Moments by the training after it, which they decide.
TEST(ParallelCheckpoint, LoadsIntoEveryOtherMesh) {
  Named expected;
  with_model({1, {}}, [&](ParallelModel& model, const Mesh&, const CheckpointState& state) {
    train(model, state, 0, 5);
    expected = whole_weights(model, state.sharded);
  });
  for (const Grids& from : meshes()) {
    const TempDir directory;
    with_model(from, [&](ParallelModel& model, const Mesh&, const CheckpointState& state) {
      train(model, state, 0, 3);
      save_checkpoint(directory.path(), state, {.step = 3});
    });
    Named saved;
    with_model({1, {}}, [&](ParallelModel& model, const Mesh&, const CheckpointState& state) {
      load_checkpoint(directory.path(), state);
      saved = whole_weights(model, state.sharded);
    });
    for (const Grids& to : meshes())
      with_model(to, [&](ParallelModel& model, const Mesh& mesh, const CheckpointState& state) {
        const std::string what = concat(text(from), " to ", text(to));
        load_checkpoint(directory.path(), state);
        for (const auto& [name, weight] : whole_weights(model, state.sharded))
          EXPECT_TRUE(at::equal(weight, owned_by(mesh, name, saved.at(name))))
              << what << " " << name;
        train(model, state, 3, 5);
        expect_owned_weights(state.sharded, mesh, model, expected, what);
      });
  }
}

// HFSDP and coarse cuts: shards that begin and end anywhere in a slice.
TEST(ParallelCheckpoint, LoadsIntoOtherStrategies) {
  const Grids from{4, {.ep = 2, .tp = 2}};
  const TempDir directory;
  Named saved;
  with_model(from, [&](ParallelModel& model, const Mesh&, const CheckpointState& state) {
    train(model, state, 0, 2);
    save_checkpoint(directory.path(), state, {.step = 2});
  });
  with_model({1, {}}, [&](ParallelModel& model, const Mesh&, const CheckpointState& state) {
    load_checkpoint(directory.path(), state);
    saved = whole_weights(model, state.sharded);
  });
  const auto check = [&](const Grids& to, const ShardOptions& options) {
    with_model(
        to,
        [&](ParallelModel& model, const Mesh& mesh, const CheckpointState& state) {
          load_checkpoint(directory.path(), state);
          for (const auto& [name, weight] : whole_weights(model, state.sharded))
            EXPECT_TRUE(at::equal(weight, owned_by(mesh, name, saved.at(name))))
                << text(to) << ", " << to_text(options.strategy) << " " << name;
        },
        options);
  };
  for (const Strategy& strategy : named_strategies())
    check({8, {.outer = 2, .ep = 2, .tp = 2}}, {.strategy = strategy});
  for (const char* granularity : {"row", "tensor"})
    check(from, {.granularity = parse_granularity(granularity)});
}

// A fused tensor that is stored as its sections, and cut over tp by section.
TEST(ParallelCheckpoint, StoresSectionsUnderNamesOfTheirOwn) {
  const NameRules rules({{.title = "gate and up",
                          .pattern = "gated.weight",
                          .dim = 0,
                          .sections = {{.name = "gated.gate"}, {.name = "gated.up"}}}});
  for (const Grids& from : {Grids{4, {.tp = 4}}, Grids{4, {.outer = 2, .tp = 2}}}) {
    const TempDir directory;
    with_model(from, [&](ParallelModel& model, const Mesh&, const CheckpointState& state) {
      train(model, state, 0, 1);
      save_checkpoint(directory.path(), state, {.step = 1}, {.form = {.names = rules}});
    });
    with_model({2, {.tp = 2}},
               [&](ParallelModel& model, const Mesh&, const CheckpointState& state) {
                 EXPECT_THAT(error_of([&] { load_checkpoint(directory.path(), state); }),
                             HasSubstr("first.gated.gate"));  // that is what it has
                 train(model, state, 0, 1);
                 const Named expected = whole_weights(model, state.sharded);
                 train(model, state, 1, 2);
                 load_checkpoint(directory.path(), state, {.names = rules});
                 for (const auto& [name, weight] : whole_weights(model, state.sharded))
                   EXPECT_TRUE(at::allclose(weight, expected.at(name), 1e-4, 2e-5)) << name;
               });
  }
}

}  // namespace
}  // namespace fsdp::testing::parallel_checkpoint_test
