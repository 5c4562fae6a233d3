// Runs with quantised weights that are saved: main weights are exact, so that a run goes on as if
// nobody had stopped it.
#include <gmock/gmock.h>

#include "fsdp/base/text.h"
#include "fsdp/checkpoint/format/tensor_catalog.h"
#include "fsdp/checkpoint/run_directory.h"
#include "fsdp/nn/layers/linear.h"
#include "support/checkpoint_training.h"
#include "support/one_in.h"

namespace fsdp::testing::quantized_checkpoint_test {
namespace {

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
  int ranks = 1;
  int outer = 1;
  std::string strategy = "optim_grads_params";
};

std::string text_of(const Case& each) {
  return concat(row_of(each.recipe).name, " ranks ", each.ranks, " outer ", each.outer, " ",
                each.strategy);
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
  std::vector<double> losses;
};

Ended run_net(const Case& each, const std::function<void(QuantizedRank&)>& body) {
  StateCollector collector;
  Ended ended;
  run_ranks(each.ranks, [&](World& world) {
    const Mesh mesh = world.mesh({.outer = each.outer});
    Net net = build([] { return Net(); });
    const Sharded sharded = fully_shard(
        net.ptr(), mesh,
        {.strategy = parse_strategy(each.strategy), .quantization = {.recipe = each.recipe}});
    AdamW optimizer(sharded, {.lr = 0.01, .weight_decay = 5.0});
    QuantizedRank rank{net, mesh, {.sharded = sharded, .optimizer = &optimizer}};
    body(rank);
    collector.add(sharded, optimizer);
    if (world.rank() != 0) return;
    ended.losses = rank.losses;
  });
  ended.state = collector.take();
  return ended;
}

Ended save_after(const Case& each, int steps, const std::string& directory) {
  return run_net(each, [&](QuantizedRank& rank) {
    rank.train(0, steps);
    Checkpointer checkpointer(directory, rank.mesh);
    checkpointer.save(rank.state, {.step = steps});
    rank.train(steps, steps + 1);  // beside the save
    checkpointer.wait();
  });
}

Ended load_into(const Case& each, const std::string& directory) {
  return run_net(each, [&](QuantizedRank& rank) { load_checkpoint(directory, rank.state); });
}

std::vector<Case> quantizing_cases() {
  std::vector<Case> cases;
  for (const WeightRecipeRow& row : all_weight_recipes())
    if (row.recipe != WeightRecipe::kPlain) cases.push_back({.recipe = row.recipe});
  return cases;
}

TEST(QuantizedCheckpoint, SixStepsAreThreeSavedAndThreeMoreOnAnyNumberOfRanks) {
  OneIn part(5);
  for (Case each : quantizing_cases()) {
    const Ended straight = run_net(each, [](QuantizedRank& rank) { rank.train(0, 6); });
    for (const int from : {1, 2, 4}) {
      const TempDir directory;
      each.ranks = from;
      save_after(each, 3, directory.path());
      for (const int to : {1, 2, 4}) {
        if (part.skips()) continue;
        each.ranks = to;
        const Ended resumed = run_net(each, [&](QuantizedRank& rank) {
          rank.train(0, 1);  // so that there are values to replace
          load_checkpoint(directory.path(), rank.state);
          rank.train(3, 6);
        });
        expect_same_state(resumed.state, straight.state, concat(text_of(each), " from ", from));
      }
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
    expect_same_state(load_into(again, second.path()).state, onward.state, text_of(each));
    // The weights are the same; codes of 3 bits are off by a few percent.
    std::vector<double> losses;
    for (const Case& then : {plain, again})
      losses.push_back(run_net(then, [&](QuantizedRank& rank) {
                         load_checkpoint(second.path(), rank.state);
                         rank.train(5, 6);
                       }).losses.front());
    EXPECT_NEAR(losses[1], losses[0], 0.03 * losses[0]) << text_of(each);
  }
}

}  // namespace
}  // namespace fsdp::testing::quantized_checkpoint_test
