// Checkpoints do not see which ranks shared out tensors and experts: any mesh loads any other's.
#include <gmock/gmock.h>

#include "fsdp/checkpoint/checkpointer.h"
#include "fsdp/checkpoint/load.h"
#include "fsdp/checkpoint/names/name_rules.h"
#include "support/one_in.h"
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

// One batch for every loss: the mean of any number of them is the same.
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

// Weights bit for bit. Moments by the training after it, which they decide. Shards of HFSDP begin
// and end anywhere in a slice.
TEST(ParallelCheckpoint, LoadsIntoEveryOtherMeshAndStrategy) {
  const std::span<const Strategy> strategies = named_strategies();
  OneIn part(5);
  size_t number = 0;
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
    for (const Grids& to : meshes()) {
      const Strategy strategy = strategies[number++ % strategies.size()];
      if (part.skips()) continue;
      const auto check = [&](ParallelModel& model, const Mesh& mesh, const CheckpointState& state) {
        const std::string what = concat(text(from), " to ", text(to), ", ", to_text(strategy));
        load_checkpoint(directory.path(), state);
        for (const auto& [name, weight] : whole_weights(model, state.sharded))
          EXPECT_TRUE(at::equal(weight, owned_by(mesh, name, saved.at(name))))
              << what << " " << name;
        train(model, state, 3, 5);
        expect_owned_weights(state.sharded, mesh, model, expected, what);
      };
      with_model(to, check, {.strategy = strategy});
    }
  }
}

// Replicas write a part each of what is large.
TEST(ParallelCheckpoint, HoldsSlicesThatSeveralRanksWrite) {
  struct LargeImpl : torch::nn::Module, JoinsTp {
    LargeImpl()
        : columns(register_parameter("columns", at::rand({700, 1600}))),
          rows(register_parameter("rows", at::rand({1600, 700}))) {}
    TpPlacement tp_placement(const std::string& name) const override {
      if (name == "rows") return TpShard{.dim = 0, .num_sections = 2};
      return TpShard{.dim = 1, .section_sizes = {400, 1200}};
    }
    at::Tensor columns, rows;
  };
  const auto large = [](uint64_t seed) {
    return build([] { return std::make_shared<LargeImpl>(); }, seed);
  };
  const auto whole = large(7);
  const TempDir directory;
  run_ranks(4, [&](World& world) {
    const Mesh mesh = world.mesh({.outer = 2, .tp = 2});
    const Sharded sharded = fully_shard(large(7), mesh);
    save_checkpoint(directory.path(), {.sharded = sharded}, {.step = 1});
  });
  for (const Grids& to : {Grids{1, {}}, Grids{4, {.tp = 4}}})
    run_ranks(to.ranks, [&](World& world) {
      const Mesh mesh = world.mesh(to.mesh);
      const auto model = large(8);
      const Sharded sharded = fully_shard(model, mesh);
      load_checkpoint(directory.path(), {.sharded = sharded});
      const auto full = sharded.full_parameters();
      const int64_t rank = mesh.tp() == nullptr ? 0 : mesh.tp()->rank();
      const int64_t size = to.mesh.tp;
      const auto part = [&](const at::Tensor& tensor, int64_t dim, int64_t begin, int64_t length) {
        return tensor.narrow(dim, begin + rank * length / size, length / size);
      };
      EXPECT_TRUE(at::equal(
          model->columns,
          at::cat({part(whole->columns, 1, 0, 400), part(whole->columns, 1, 400, 1200)}, 1)));
      EXPECT_TRUE(at::equal(
          model->rows, at::cat({part(whole->rows, 0, 0, 800), part(whole->rows, 0, 800, 800)})));
    });
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
