// A model that does not fuse tensors loads the checkpoint of one that does, moments included.
#include <gtest/gtest.h>

#include "fsdp/base/text.h"
#include "fsdp/checkpoint/names/name_tables.h"
#include "support/checkpoint_training.h"
#include "support/one_in.h"

namespace fsdp::testing::fused_checkpoint_test {
namespace {

constexpr int64_t kHidden = 13;
constexpr int64_t kWidth = 11;

// y = W_down (gate(x) * up(x)): gate and up as one matrix, or as two.
struct FusedMlpImpl : torch::nn::Module {
  FusedMlpImpl()
      : linear_fc1(register_module("linear_fc1", torch::nn::Linear(kHidden, 2 * kWidth))),
        linear_fc2(register_module("linear_fc2", torch::nn::Linear(kWidth, kHidden))) {}
  at::Tensor forward(const at::Tensor& x) {
    const std::vector<at::Tensor> halves = linear_fc1(x).chunk(2, -1);
    return linear_fc2(at::tanh(halves[0]) * halves[1]);
  }
  torch::nn::Linear linear_fc1;
  torch::nn::Linear linear_fc2;
};
TORCH_MODULE(FusedMlp);

// FusedMlp with the names that the rules give the halves.
struct UnfusedMlpImpl : torch::nn::Module {
  UnfusedMlpImpl() {
    linear_fc1 = register_module("linear_fc1", std::make_shared<torch::nn::Module>());
    for (const char* half : {"_w", "_v"}) {
      weights.push_back(linear_fc1->register_parameter(std::string("weight") + half,
                                                       at::zeros({kWidth, kHidden})));
      biases.push_back(
          linear_fc1->register_parameter(std::string("bias") + half, at::zeros({kWidth})));
    }
    linear_fc2 = register_module("linear_fc2", torch::nn::Linear(kWidth, kHidden));
  }
  at::Tensor forward(const at::Tensor& x) {
    return linear_fc2(at::tanh(at::linear(x, weights[0], biases[0])) *
                      at::linear(x, weights[1], biases[1]));
  }
  std::shared_ptr<torch::nn::Module> linear_fc1;
  torch::nn::Linear linear_fc2{nullptr};
  std::vector<at::Tensor> weights;
  std::vector<at::Tensor> biases;
};
TORCH_MODULE(UnfusedMlp);

template <typename Mlp>
struct TwoMlpsImpl : torch::nn::Module {
  TwoMlpsImpl() {
    for (int i = 0; i < 2; ++i) {
      const auto layer =
          register_module("layer" + std::to_string(i), std::make_shared<torch::nn::Module>());
      mlps.push_back(layer->register_module("mlp", Unit<Mlp>()));
    }
  }
  at::Tensor forward(at::Tensor x) {
    for (Unit<Mlp>& mlp : mlps) x = mlp(x);
    return x;
  }
  std::vector<Unit<Mlp>> mlps;
};
TORCH_MODULE_IMPL(FusedModel, TwoMlpsImpl<FusedMlp>);
TORCH_MODULE_IMPL(UnfusedModel, TwoMlpsImpl<UnfusedMlp>);

const NameRules& rules() {
  static const NameRules table(megatron_rules());
  return table;
}

template <typename Model>
WholeState run(int ranks, double offloaded,
               const std::function<void(Model&, const CheckpointState&, int rank)>& body) {
  StateCollector collector;
  run_ranks(ranks, [&](World& world) {
    const Mesh mesh = world.mesh({});
    Model model = build([] { return Model(); });
    ShardOptions options{.strategy = Strategy::optim_grads_params};
    options.offload.fraction = offloaded;
    const Sharded sharded = fully_shard(model, mesh, options);
    AdamW optimizer(sharded, {.lr = 0.01});
    body(model, {.sharded = sharded, .optimizer = &optimizer}, world.rank());
    collector.add(sharded, optimizer);
  });
  return collector.take();
}

template <typename Model>
void train(Model& model, const CheckpointState& state, int rank) {
  for (int step = 0; step < 3; ++step) {
    model(input_for(rank, step, {2, kHidden})).square().sum().backward();
    state.optimizer->step();
    state.optimizer->zero_grad();
  }
}

// The unfused model's state, from that of the fused one.
WholeState unfused(const WholeState& fused) {
  WholeState state;
  for (const auto& [name, value] : fused) {
    const size_t at = name.find("linear_fc1.");
    if (at == std::string::npos) {
      state[name] = value;
      continue;
    }
    const size_t end = name.find('.', at + std::string("linear_fc1.").size());
    const std::string parameter = name.substr(0, end);
    const std::string moment = end == std::string::npos ? "" : name.substr(end);
    state[parameter + "_w" + moment] = value.narrow(0, 0, kWidth);
    state[parameter + "_v" + moment] = value.narrow(0, kWidth, kWidth);
  }
  return state;
}

const std::vector<int> kRanks = {1, 2, 3, 5};

TEST(FusedCheckpoint, SectionsAreStoredAndAnUnfusedModelLoadsThem) {
  OneIn part(3);
  for (const int writers : kRanks)
    for (const double offloaded : {0.0, 0.6}) {
      if (part.skips()) continue;
      const TempDir directory;
      const WholeState fused = run<FusedModel>(
          writers, offloaded, [&](FusedModel& model, const CheckpointState& state, int rank) {
            train(model, state, rank);
            save_checkpoint(directory.path(), state, {.step = 1}, {.form = {.names = rules()}});
          });
      for (const int readers : kRanks) {
        // Without rules, because its names are those in the files.
        const WholeState loaded =
            run<UnfusedModel>(readers, 0.0, [&](UnfusedModel&, const CheckpointState& state, int) {
              load_checkpoint(directory.path(), state);
            });
        expect_same_state(loaded, unfused(fused), concat(writers, " to ", readers));
        const WholeState again = run<FusedModel>(
            readers, offloaded, [&](FusedModel&, const CheckpointState& state, int) {
              load_checkpoint(directory.path(), state, {.names = rules()});
            });
        expect_same_state(again, fused, concat(writers, " to fused ", readers));
      }
    }
}

}  // namespace
}  // namespace fsdp::testing::fused_checkpoint_test
