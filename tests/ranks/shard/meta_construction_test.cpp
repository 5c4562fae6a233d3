// Models without memory that get their values while they are sharded.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/nn/init.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/normalization.h>

#include <map>
#include <optional>

#include "fsdp/comm/world.h"
#include "fsdp/nn/layers/linear.h"
#include "fsdp/shard/engine/engine.h"
#include "fsdp/shard/parameter_init.h"
#include "support/sharded_training.h"
#include "support/watched_memory.h"

namespace fsdp::meta_construction_test {
namespace {

using ::testing::AllOf;
using testing::error_of;
using ::testing::HasSubstr;

struct SharingLinearImpl : torch::nn::LinearImpl {
  using torch::nn::LinearImpl::LinearImpl;
  void share(const at::Tensor& other) { weight = parameters_["weight"] = other; }
};
TORCH_MODULE(SharingLinear);

// A module with its own parameters and a buffer, which sets their first values.
struct ScaleImpl : torch::nn::Module, ParameterInit {
  explicit ScaleImpl(int64_t width)
      : scale(register_parameter("scale", at::empty({width}))),
        positions(register_buffer("positions", at::empty({width}))) {
    reset_parameters();
  }
  void reset_parameters() override {
    torch::nn::init::normal_(scale, 1.0, 0.1);
    const at::NoGradGuard no_grad;
    positions.copy_(at::arange(positions.numel(), positions.options()) * 0.5);
  }
  at::Tensor forward(const at::Tensor& x) { return x * scale + positions; }
  at::Tensor scale;
  at::Tensor positions;
};
TORCH_MODULE(Scale);

struct LayerImpl : torch::nn::Module {
  at::Tensor forward(const at::Tensor& x) { return x + down(scale(up(norm(x)))); }
  torch::nn::LayerNorm norm =
      register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({6})));
  nn::Linear up = register_module("up", nn::Linear(6, 13));
  Scale scale = register_module("scale", Scale(13));
  torch::nn::Linear down = register_module("down", torch::nn::Linear(13, 6));
};

struct HeadImpl : torch::nn::Module {
  at::Tensor forward(const at::Tensor& x) { return norm(projection(x)); }
  SharingLinear projection =
      register_module("projection", SharingLinear(torch::nn::LinearOptions(6, 11).bias(false)));
  torch::nn::BatchNorm1d norm = register_module("norm", torch::nn::BatchNorm1d(11));
};

struct ModelImpl : torch::nn::Module {
  ModelImpl()
      : embedding(register_module("embedding", Unit<torch::nn::Embedding>(11, 6))),
        first(register_module("first", Unit<LayerImpl>())),
        head(register_module("head", Unit<HeadImpl>())),
        last(register_module("last", torch::nn::Linear(11, 2))) {
    // After the head drew its own random numbers: the layers behind it must see the same ones.
    head->projection->share(embedding->weight);
  }
  at::Tensor forward(const at::Tensor& tokens) { return last(head(first(embedding(tokens)))); }
  Unit<torch::nn::Embedding> embedding;
  Unit<LayerImpl> first;
  Unit<HeadImpl> head;
  torch::nn::Linear last;
};
TORCH_MODULE(Model);

TEST(MetaConstruction, TakesNoMemory) {
  const testing::TensorAllocations allocations;
  Model model = nullptr;
  {
    const MetaConstruction meta;
    model = Model();
  }
  EXPECT_LE(allocations.peak_bytes(), 8) << "the counter of BatchNorm has a value, not a shape";
  for (const at::Tensor& parameter : model->parameters()) EXPECT_TRUE(parameter.is_meta());
  for (const at::Tensor& buffer : model->buffers())
    EXPECT_TRUE(buffer.is_meta() || buffer.dim() == 0) << buffer.sizes();
  EXPECT_FALSE(at::empty({2}).is_meta()) << "over when the guard is";
}

// A rank builds the model from the seed like all others.
struct Built {
  Built(int rank, int ranks, at::ScalarType dtype)
      : world(World::simulated(rank, ranks, std::make_shared<Recording>())), mesh(world.mesh()) {
    torch::manual_seed(11);
    {
      const MetaConstruction meta;
      model = Model();
    }
    if (dtype != at::kFloat) model->to(dtype);
    sharded.emplace(fully_shard(model, mesh));
  }
  World world;
  Mesh mesh;
  Model model = nullptr;
  std::optional<Sharded> sharded;
};

TEST(MetaConstruction, EqualsConstructionOnTheDeviceBitForBitOnEveryRank) {
  for (const auto dtype : {at::kFloat, at::kBFloat16}) {
    torch::manual_seed(11);
    Model plain;
    if (dtype != at::kFloat) plain->to(dtype);
    std::map<std::string, at::Tensor> expected;
    for (const auto& item : plain->named_parameters()) expected[item.key()] = item.value();
    for (const int ranks : {1, 2, 3}) {
      for (int rank = 0; rank < ranks; ++rank) {
        const Built built(rank, ranks, dtype);
        for (const ShardedParameter& each : built.sharded->parameters()) {
          const at::Tensor whole = expected.at(each.name).detach().view({-1});
          const at::Tensor part = whole.narrow(0, each.begin, each.main_weight.numel());
          EXPECT_TRUE(at::equal(each.main_weight, part.to(at::kFloat)))
              << each.name << " on rank " << rank << " of " << ranks;
        }
        const auto buffers = built.model->named_buffers();
        for (const auto& item : plain->named_buffers())
          EXPECT_TRUE(at::equal(buffers[item.key()], item.value())) << item.key();
      }
    }
  }
}

constexpr int64_t kWidth = 2048;  // far more than is looked at in one go
constexpr int64_t kModuleBytes = kWidth * kWidth * 4;

TEST(MetaConstruction, HoldsNoMoreThanOneModuleWhole) {
  struct WideImpl : torch::nn::Module {
    WideImpl() {
      for (int i = 0; i < 4; ++i)
        units.push_back(
            register_module("unit" + std::to_string(i), Unit<testing::Block>(kWidth, kWidth)));
    }
    std::vector<Unit<testing::Block>> units;
  };
  World world = World::simulated(0, 64, std::make_shared<Recording>());
  const Mesh mesh = world.mesh();
  std::shared_ptr<WideImpl> model;
  {
    const MetaConstruction meta;
    model = std::make_shared<WideImpl>();
  }
  const testing::TensorAllocations allocations;  // does not count sharding's own memory
  Sharded sharded = fully_shard(model, mesh);
  EXPECT_GE(allocations.peak_bytes(), kModuleBytes) << "or this would count nothing";
  EXPECT_LT(allocations.peak_bytes(), 2 * kModuleBytes) << "4 modules would be 4 times that";
  // Two slots for weights, two for gradients, and a 64th of everything.
  EXPECT_LT(sharded.memory().peak_bytes, 5 * (kModuleBytes + 4 * kWidth));
}

TEST(MetaConstruction, OfAModuleThatCannotBeInitialisedIsAnErrorThatNamesIt) {
  struct SilentImpl : torch::nn::Module {
    at::Tensor secret = register_parameter("secret", at::empty({3}));
  };
  struct OuterImpl : torch::nn::Module {
    std::shared_ptr<SilentImpl> silent = register_module("silent", std::make_shared<SilentImpl>());
  };
  World world = World::simulated(0, 2, std::make_shared<Recording>());
  const Mesh mesh = world.mesh();
  std::shared_ptr<OuterImpl> model;
  {
    const MetaConstruction meta;
    model = std::make_shared<OuterImpl>();
  }
  EXPECT_THAT(error_of([&] { fully_shard(model, mesh); }),
              AllOf(HasSubstr("module 'silent'"), HasSubstr("fsdp::ParameterInit")));
}

}  // namespace
}  // namespace fsdp::meta_construction_test
