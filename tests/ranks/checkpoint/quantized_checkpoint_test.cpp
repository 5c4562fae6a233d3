// Runs with quantised weights that are saved: main weights are exact, and what delayed scales look
// back at is there again, so that a run goes on as if nobody had stopped it.
#include <gmock/gmock.h>

#include "fsdp/base/text.h"
#include "fsdp/checkpoint/format/tensor_catalog.h"
#include "fsdp/checkpoint/names/name_rules.h"
#include "fsdp/checkpoint/run_directory.h"
#include "fsdp/layout/quantized_bytes.h"
#include "fsdp/nn/layers/linear.h"
#include "fsdp/shard/engine/engine.h"
#include "support/checkpoint_training.h"
#include "support/error_of.h"
#include "support/parallel_model.h"

namespace fsdp::testing::quantized_checkpoint_test {
namespace {

using ::testing::Contains;
using ::testing::EndsWith;
using ::testing::Not;

// Several scales of blocks, and a last one that is smaller.
constexpr int64_t kIn = 160;
constexpr int64_t kHidden = 288;

struct LayersImpl : torch::nn::Module {
  LayersImpl()
      : up(register_module("up", nn::Linear(kIn, kHidden))),
        down(register_module("down", nn::Linear(kHidden, kIn))) {}
  at::Tensor forward(const at::Tensor& x) { return x + down(at::tanh(up(x))); }
  nn::Linear up, down;
};
TORCH_MODULE(Layers);

struct NetImpl : torch::nn::Module {
  NetImpl()
      : first(register_module("first", Unit<Layers>())),
        second(register_module("second", Unit<Layers>())) {}
  at::Tensor forward(const at::Tensor& x) { return second(first(x)); }
  Unit<Layers> first{nullptr}, second{nullptr};
};
TORCH_MODULE(Net);

// Every rank has the same input, so that all numbers of ranks have the same gradients.
at::Tensor input_of(int step) {
  return (at::arange(16 * kIn).view({16, kIn}) * 0.37 + 10 * step).sin();
}

struct Case {
  WeightRecipe recipe = WeightRecipe::kFp8Row;
  WeightScaling scaling = WeightScaling::kCurrent;
  int ranks = 1;
  int outer = 1;
  std::string strategy = "optim_grads_params";
};

std::string text_of(const Case& each) {
  return concat(row_of(each.recipe).name, " ", name_of(each.scaling), " ranks ", each.ranks,
                " outer ", each.outer, " ", each.strategy);
}

// By parameter.
using Histories = std::map<std::string, at::Tensor>;

Histories histories_of(const Sharded& sharded) {
  Histories histories;
  for (const auto& unit : EngineAccess::of(sharded).units())
    for (const ParamGroup& group : unit->groups())
      if (group.is_quantized() && group.quantized().has_history())
        for (int64_t i = 0; i < group.layout().num_tensors(); ++i)
          histories[group.name_of(i)] = group.quantized().history_of(i).clone();
  return histories;
}

struct QuantizedRank {
  Net net;
  const Mesh& mesh;
  CheckpointState state;

  void train(int first_step, int last_step) {
    for (int step = first_step; step < last_step; ++step) {
      at::Tensor loss = net(input_of(step)).square().mean();
      losses.push_back(loss.item<double>());
      loss.backward();
      state.optimizer->step();
      state.optimizer->zero_grad();
    }
  }
  std::vector<double> losses = {};
};

struct Ended {
  WholeState state;
  Histories histories;
  std::vector<double> losses;
};

Ended run_net(const Case& each, const std::function<void(QuantizedRank&)>& body) {
  StateCollector collector;
  Ended ended;
  run_ranks(each.ranks, [&](World& world) {
    const Mesh mesh = world.mesh({.outer = each.outer});
    Net net = build([] { return Net(); });
    const Sharded sharded =
        fully_shard(net.ptr(), mesh,
                    {.strategy = parse_strategy(each.strategy),
                     .quantization = {.recipe = each.recipe, .scaling = each.scaling}});
    // The decay makes magnitudes smaller, so that scales of earlier ones are others.
    AdamW optimizer(sharded, {.lr = 0.01, .weight_decay = 5.0});
    QuantizedRank rank{net, mesh, {.sharded = sharded, .optimizer = &optimizer}};
    body(rank);
    collector.add(sharded, optimizer);
    if (world.rank() != 0) return;
    ended.histories = histories_of(sharded);
    ended.losses = rank.losses;
  });
  ended.state = collector.take();
  return ended;
}

void expect_same(const Ended& actual, const Ended& expected, const std::string& what) {
  expect_same_state(actual.state, expected.state, what);
  ASSERT_EQ(actual.histories.size(), expected.histories.size()) << what;
  for (const auto& [name, history] : expected.histories)
    EXPECT_TRUE(at::equal(actual.histories.at(name), history)) << what << " " << name;
}

Ended save_after(const Case& each, int steps, const std::string& directory,
                 const CheckpointerOptions& options = {}) {
  return run_net(each, [&](QuantizedRank& rank) {
    rank.train(0, steps);
    Checkpointer checkpointer(directory, rank.mesh, options);
    checkpointer.save(rank.state, {.step = steps});
    rank.train(steps, steps + 1);  // beside the save
    checkpointer.wait();
  });
}

Ended load_into(const Case& each, const std::string& directory, const LoadOptions& options = {}) {
  return run_net(each,
                 [&](QuantizedRank& rank) { load_checkpoint(directory, rank.state, options); });
}

std::vector<std::string> names_beside_model(const std::string& directory) {
  std::vector<std::string> names;
  const TensorCatalog catalog(checkpoint_or_files(directory));
  for (const auto& [name, tensor] : catalog.moments()) names.push_back(name);
  return names;
}

std::vector<Case> quantizing_cases() {
  std::vector<Case> cases;
  for (const WeightRecipeRow& row : all_weight_recipes())
    for (const WeightScaling scaling : all_weight_scalings())
      if (row.recipe != WeightRecipe::kPlain)
        cases.push_back({.recipe = row.recipe, .scaling = scaling});
  return cases;
}

// --- going on ------------------------------------------------------------------------------------

TEST(QuantizedCheckpoint, SixStepsAreThreeSavedAndThreeMoreOnAnyNumberOfRanks) {
  for (Case each : quantizing_cases()) {
    const Ended straight = run_net(each, [](QuantizedRank& rank) { rank.train(0, 6); });
    for (const int from : {1, 2, 4}) {
      const TempDir directory;
      each.ranks = from;
      save_after(each, 3, directory.path());
      for (const int to : {1, 2, 4}) {
        each.ranks = to;
        const Ended resumed = run_net(each, [&](QuantizedRank& rank) {
          rank.train(0, 1);  // so that there are values to replace
          load_checkpoint(directory.path(), rank.state);
          rank.train(3, 6);
        });
        expect_same(resumed, straight, concat(text_of(each), " from ", from));
      }
    }
  }
}

TEST(QuantizedCheckpoint, GoesOnWithOtherStrategies) {
  for (const WeightRecipe recipe : {WeightRecipe::kFp8Row, WeightRecipe::kMxFp8}) {
    const Case plain{.recipe = recipe, .scaling = WeightScaling::kDelayed};
    const Ended straight = run_net(plain, [](QuantizedRank& rank) { rank.train(0, 4); });
    std::string before = "no_shard";
    for (const std::string& strategy : kStrategies) {
      const TempDir directory;
      Case each = plain;
      each.ranks = 4;
      each.outer = 2;
      each.strategy = std::exchange(before, strategy);
      save_after(each, 2, directory.path());
      each.strategy = strategy;
      const Ended resumed = run_net(each, [&](QuantizedRank& rank) {
        load_checkpoint(directory.path(), rank.state);
        rank.train(2, 4);
      });
      expect_same(resumed, straight, text_of(each));
    }
  }
}

TEST(QuantizedCheckpoint, GoesOnWithPlainWeightsAndBack) {
  for (const Case& each : quantizing_cases()) {
    const TempDir first, second;
    const Ended saved = run_net(each, [&](QuantizedRank& rank) {
      rank.train(0, 3);
      save_checkpoint(first.path(), rank.state, {.step = 3});
    });
    const TensorCatalog catalog(checkpoint_or_files(first.path()));
    for (const auto& [name, tensor] : catalog.model())
      EXPECT_EQ(tensor.tensor.dtype, DType::kFloat32) << name;
    const Case plain{.recipe = WeightRecipe::kPlain, .ranks = 2};
    Case again = each;
    again.ranks = 3;
    // Main weights and moments are the same bits everywhere.
    for (const Case& then : {plain, again})
      expect_same_state(load_into(then, first.path()).state, saved.state, text_of(each));
    const Ended onward = run_net(plain, [&](QuantizedRank& rank) {
      load_checkpoint(first.path(), rank.state);
      rank.train(3, 5);
      save_checkpoint(second.path(), rank.state, {.step = 5});
    });
    EXPECT_THAT(names_beside_model(second.path()), Not(Contains(EndsWith(".amax_history"))));
    expect_same_state(load_into(again, second.path()).state, onward.state, text_of(each));
    // Of the same weights; codes of 3 bits are off by a few percent.
    std::vector<double> losses;
    for (const Case& then : {plain, again})
      losses.push_back(run_net(then, [&](QuantizedRank& rank) {
                         load_checkpoint(second.path(), rank.state);
                         rank.train(5, 6);
                       }).losses.front());
    EXPECT_NEAR(losses[1], losses[0], 0.03 * losses[0]) << text_of(each);
  }
}

// --- what delayed scales look back at ------------------------------------------------------------

TEST(QuantizedCheckpoint, BeginsHistoriesThatItDoesNotHave) {
  const TempDir directory;
  save_after({.ranks = 2}, 2, directory.path());
  const Case delayed{.scaling = WeightScaling::kDelayed, .ranks = 2};
  for (const auto& [name, history] : load_into(delayed, directory.path()).histories) {
    EXPECT_GT(history[0].min().item<double>(), 0.0) << name;
    EXPECT_TRUE(at::equal(history[0], history[1])) << name;
    EXPECT_EQ(history.narrow(0, 2, kAmaxHistory - 1).max().item<double>(), 0.0) << name;
  }
}

TEST(QuantizedCheckpoint, BeginsHistoriesOfAnotherRecipeAndLeavesOthersOut) {
  const TempDir directory;
  save_after({.scaling = WeightScaling::kDelayed, .ranks = 2}, 3, directory.path());
  EXPECT_THAT(names_beside_model(directory.path()),
              Contains("first.up.weight.amax_history").Times(1));
  // Nobody is asked to allow extra tensors.
  load_into({.recipe = WeightRecipe::kPlain}, directory.path());
  load_into({.ranks = 3}, directory.path());
  const Case block{.recipe = WeightRecipe::kFp8Block, .scaling = WeightScaling::kDelayed};
  for (const auto& [name, history] : load_into(block, directory.path()).histories)
    EXPECT_TRUE(at::equal(history[0], history[1])) << name;
  const Case row{.scaling = WeightScaling::kDelayed};
  for (const auto& [name, history] : load_into(row, directory.path()).histories)
    EXPECT_FALSE(at::equal(history[0], history[1])) << name;
}

TEST(QuantizedCheckpoint, HasHistoriesOfWeightsAlone) {
  const TempDir directory;
  const Case each{.scaling = WeightScaling::kDelayed, .ranks = 2};
  const Ended saved = run_net(each, [&](QuantizedRank& rank) {
    rank.train(0, 3);
    save_checkpoint(directory.path(), {.sharded = rank.state.sharded}, {.step = 3});
  });
  const Ended loaded = run_net(each, [&](QuantizedRank& rank) {
    EXPECT_THAT(error_of([&] { load_checkpoint(directory.path(), rank.state); }),
                ::testing::HasSubstr("it holds no optimizer state"));
    load_checkpoint(directory.path(), {.sharded = rank.state.sharded});
  });
  for (const auto& [name, history] : saved.histories)
    EXPECT_TRUE(at::equal(loaded.histories.at(name), history)) << name;
}

// Sections of a fused matrix are tensors of their own; its history has the name in the model.
TEST(QuantizedCheckpoint, KeepsHistoriesOfMatricesWithOtherNames) {
  const NameRules rules({{.title = "halves",
                          .pattern = "up.weight",
                          .dim = 0,
                          .sections = {{.name = "gate.weight"}, {.name = "other.weight"}}},
                         {.title = "down", .pattern = "down.*", .sections = {{.name = "out.$1"}}}});
  const Case each{.scaling = WeightScaling::kDelayed, .ranks = 2};
  const Ended straight = run_net(each, [](QuantizedRank& rank) { rank.train(0, 4); });
  for (const bool renames_when_saved : {true, false}) {
    const TempDir directory;
    save_after(each, 2, directory.path(),
               {.form = {.names = renames_when_saved ? rules : NameRules()}});
    EXPECT_THAT(names_beside_model(directory.path()),
                Contains(renames_when_saved ? "first.out.weight.amax_history"
                                            : "first.down.weight.amax_history"));
    const Ended resumed = run_net(each, [&](QuantizedRank& rank) {
      load_checkpoint(directory.path(), rank.state, {.names = rules});
      rank.train(2, 4);
    });
    expect_same(resumed, straight, renames_when_saved ? "saved so" : "loaded so");
  }
}

// --- slices --------------------------------------------------------------------------------------

struct SlicesImpl : torch::nn::Module, parallel::JoinsTp, QuantizableModule {
  SlicesImpl()
      : rows(register_parameter("rows", at::rand({512, 64}))),
        columns(register_parameter("columns", at::rand({64, 512}))) {}
  TpPlacement tp_placement(const std::string& name) const override {
    return name == "rows" ? TpShard{.dim = 0, .num_sections = 2} : TpShard{.dim = 1};
  }
  bool is_quantizable(const std::string&) const override { return true; }
  at::Tensor rows, columns;
};

// Of the 512 rows or columns, those of a rank.
at::Tensor cut_of(const std::string& name, int64_t rank, int64_t tp) {
  const int64_t sections = name == "rows" ? 2 : 1;
  const int64_t part = 512 / sections / tp;
  return at::arange(512).view({sections, -1}).narrow(1, rank * part, part).flatten();
}

// A number for each update and scale: those of the whole matrix, or of the slice.
at::Tensor numbers_of(const std::string& name, int64_t rank, int64_t tp, int64_t block) {
  const at::Tensor updates = at::arange(1 + kAmaxHistory).unsqueeze(1) * 1000.0;
  if (block > 0) {
    const at::Tensor cut = cut_of(name, rank, tp);
    return updates + cut.index({at::arange(0, cut.numel(), block)}).floor_divide(block) + 1.0;
  }
  return updates + static_cast<double>(10 * tp + rank);
}

// 0: its scales are those of slices by themselves.
int64_t whole_block(WeightRecipe recipe, const std::string& name, int64_t tp) {
  if (recipe == WeightRecipe::kFp8Row && name == "rows") return 1;
  if (recipe == WeightRecipe::kFp8Block && cut_of(name, 0, tp).numel() % 128 == 0)
    return name == "columns" || tp <= 2 ? 128 : 0;
  return 0;
}

void with_slices(WeightRecipe recipe, int tp,
                 const std::function<void(const Sharded&, int64_t rank)>& body) {
  run_ranks(4, [&](World& world) {
    const Mesh mesh = world.mesh({.tp = tp});
    const auto model = build([] { return std::make_shared<SlicesImpl>(); });
    const Sharded sharded = fully_shard(
        model, mesh, {.quantization = {.recipe = recipe, .scaling = WeightScaling::kDelayed}});
    body(sharded, mesh.tp() == nullptr ? 0 : mesh.tp()->rank());
  });
}

TEST(QuantizedCheckpoint, CutsHistoriesLikeMatricesWhereSlicesHaveScalesOfTheWhole) {
  for (const WeightRecipe recipe :
       {WeightRecipe::kFp8Tensor, WeightRecipe::kFp8Row, WeightRecipe::kFp8Block})
    for (const int from : {1, 2, 4}) {
      const TempDir directory;
      with_slices(recipe, from, [&](const Sharded& sharded, int64_t rank) {
        for (const auto& unit : EngineAccess::of(sharded).units())
          for (ParamGroup& group : unit->groups())
            for (int64_t i = 0; i < group.layout().num_tensors(); ++i) {
              const std::string& name = group.name_of(i);
              const at::Tensor numbers =
                  numbers_of(name, rank, from, whole_block(recipe, name, from));
              group.quantized().set_history(
                  i, numbers.to(at::kFloat).expand_as(group.quantized().history_of(i)));
            }
        save_checkpoint(directory.path(), {.sharded = sharded}, {.step = 1});
      });
      for (const int to : {1, 2, 4})
        with_slices(recipe, to, [&](const Sharded& sharded, int64_t rank) {
          load_checkpoint(directory.path(), {.sharded = sharded});
          for (const auto& [name, history] : histories_of(sharded)) {
            const int64_t block = whole_block(recipe, name, to);
            const std::string what =
                concat(row_of(recipe).name, " ", name, " from tp ", from, " to ", to);
            if (from == to || (block > 0 && whole_block(recipe, name, from) > 0)) {
              EXPECT_TRUE(at::equal(
                  history, numbers_of(name, rank, to, block).to(at::kFloat).expand_as(history)))
                  << what;
            } else {
              EXPECT_EQ(history.narrow(0, 2, kAmaxHistory - 1).max().item<double>(), 0.0) << what;
            }
          }
        });
    }
}

}  // namespace
}  // namespace fsdp::testing::quantized_checkpoint_test
