// The outputs of units and their use by the caller: hooks must find the backward in every case.
#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <vector>

#include "fsdp/shard/fully_shard.h"
#include "fsdp/shard/unit.h"
#include "support/run_ranks.h"

namespace fsdp::unit_outputs_test {
namespace {

using testing::run_ranks;

using Tensors = std::vector<at::Tensor>;

// A unit with two weights whose forward the test defines.
struct LayerImpl : torch::nn::Module {
  using Function = std::function<Tensors(LayerImpl&, const at::Tensor&)>;
  explicit LayerImpl(Function wanted) : function(std::move(wanted)) {}
  Tensors forward(const at::Tensor& x) { return function(*this, x); }
  Function function;
  at::Tensor first = register_parameter("first", at::linspace(0.5, 1.5, 16).view({4, 4}));
  at::Tensor second = register_parameter("second", at::linspace(-1.0, 1.0, 16).view({4, 4}));
};
TORCH_MODULE(Layer);

struct UseCase {
  std::string name;
  LayerImpl::Function forward;
  std::function<at::Tensor(Tensors)> caller = [](Tensors y) { return y.back(); };
};

// Three units in a row, so that the weights of each are released when its backward begins.
struct ChainImpl : torch::nn::Module {
  explicit ChainImpl(const UseCase& wanted) : use(wanted) {
    for (const char* name : {"a", "b", "c"})
      layers.push_back(register_module(name, Unit<Layer>(use.forward)));
  }
  at::Tensor forward(at::Tensor x) {
    for (Unit<Layer>& layer : layers) x = use.caller(layer(x)).contiguous();
    return x;
  }
  const UseCase use;
  std::vector<Unit<Layer>> layers;
};
TORCH_MODULE(Chain);

at::Tensor product(LayerImpl& layer, const at::Tensor& x) {
  return at::tanh(x.mm(layer.first)).mm(layer.second);
}

std::vector<UseCase> use_cases() {
  return {
      {"ReturnsAView",
       [](LayerImpl& layer, const at::Tensor& x) { return Tensors{product(layer, x).t()}; }},
      {"ReturnsItsInputToo",
       [](LayerImpl& layer, const at::Tensor& x) {
         return Tensors{x, product(layer, x)};
       },
       [](Tensors y) { return y[0] + y[1]; }},
      {"ReturnsPiecesOfOneTensor",
       [](LayerImpl& layer, const at::Tensor& x) { return product(layer, x).chunk(2); },
       [](Tensors y) {
         return at::cat({y[1], y[0]});
       }},
      {"ReturnsWhatItGoesOnToUse",
       [](LayerImpl& layer, const at::Tensor& x) {
         const at::Tensor middle = x.mm(layer.first);
         return Tensors{middle, middle.mm(layer.second)};
       },
       [](Tensors y) { return y[0] * y[1]; }},
      {"OutputIsChangedInPlace",
       [](LayerImpl& layer, const at::Tensor& x) { return Tensors{product(layer, x)}; },
       [](Tensors y) { return y[0].mul_(2.0).sigmoid_(); }},
      {"OutputThatIsAViewIsChangedInPlace",
       [](LayerImpl& layer, const at::Tensor& x) { return Tensors{product(layer, x).t()}; },
       [](Tensors y) { return y[0].mul_(2.0).sigmoid_(); }},
      {"OneOutputIsNotUsed",
       [](LayerImpl& layer, const at::Tensor& x) {
         const at::Tensor middle = x.mm(layer.first);
         return Tensors{middle.mm(layer.second), middle};
       },
       [](Tensors y) { return y[0]; }},
  };
}

class UnitOutputs : public ::testing::TestWithParam<UseCase> {};

TEST_P(UnitOutputs, GivesTheGradientsOfAPlainModel) {
  const at::Tensor x = at::linspace(-1.0, 1.0, 16).view({4, 4});
  Chain plain(GetParam());
  plain(x).square().sum().backward();
  for (const int ranks : {1, 2}) {
    run_ranks(ranks, [&](World& world) {
      const Mesh mesh = world.mesh();
      Chain model(GetParam());
      const Sharded sharded = fully_shard(model, mesh);
      for (int step = 0; step < 3; ++step) {
        model(x).square().sum().backward();
        for (const ShardedParameter& parameter : sharded.parameters()) {
          const at::Tensor whole = plain->named_parameters()[parameter.name].grad().view(-1);
          const at::Tensor expected =
              whole.narrow(0, parameter.begin, parameter.main_weight.numel());
          EXPECT_TRUE(at::allclose(parameter.gradient, expected, 1e-5, 1e-6))
              << parameter.name << " in step " << step;
        }
        sharded.zero_grad();
      }
    });
  }
}

INSTANTIATE_TEST_SUITE_P(All, UnitOutputs, ::testing::ValuesIn(use_cases()),
                         [](const auto& each) { return each.param.name; });

}  // namespace
}  // namespace fsdp::unit_outputs_test
