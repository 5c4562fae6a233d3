// The way of a sharded model's gradients: slabs, zeros, sums of several uses.
#include <c10/util/accumulate.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/embedding.h>

#include <atomic>

#include "fsdp/nn/layers/linear.h"
#include "fsdp/shard/engine/engine.h"
#include "support/run_ranks.h"
#include "support/trains_like_plain.h"
#include "support/watched_memory.h"

namespace fsdp::gradients_test {
namespace {

using testing::build;
using testing::Chain;
using ::testing::ElementsAre;
using testing::expect_trains_like_plain;
using testing::input_for;
using testing::kSquare;
using testing::on_sharded_chain;
using testing::run_ranks;

const std::vector<Strategy> kStrategies = {Strategy::no_shard, Strategy::optim,
                                           Strategy::optim_grads, Strategy::optim_grads_params};

at::Tensor tokens_for(int rank, int step) {
  return (at::arange(6, at::kLong) * (rank + 2) + step).remainder(8);
}

ShardedParameter parameter_of(const Sharded& sharded, const std::string& name) {
  for (ShardedParameter& each : sharded.parameters())
    if (each.name == name) return each;
  ADD_FAILURE() << "no parameter " << name;
  return {};
}

// --- direct writes -------------------------------------------------------------------------------

struct DirectBlockImpl : torch::nn::Module {
  DirectBlockImpl(int64_t in, int64_t out)
      : linear(register_module("linear", nn::Linear(in, out))) {}
  at::Tensor forward(const at::Tensor& x) { return at::tanh(linear(x)); }
  nn::Linear linear;
};
TORCH_MODULE(DirectBlock);

// Units of three layers; plain ones are torch's.
template <typename Layer>
struct NetImpl : torch::nn::Module {
  explicit NetImpl(int64_t width)
      : first(register_module("first", Unit<Layer>(5, width))),
        second(register_module("second", Unit<Layer>(width, width))),
        third(register_module("third", Unit<Layer>(width, 3))) {}
  at::Tensor forward(const at::Tensor& x) { return third(second(first(x))); }
  Unit<Layer> first, second, third;
};
using DirectNet = torch::nn::ModuleHolder<NetImpl<DirectBlock>>;
using PlainNet = torch::nn::ModuleHolder<NetImpl<testing::Block>>;

TEST(DirectGradients, TakeNoMemoryOfTheirOwn) {
  constexpr int64_t kWidth = 64;
  constexpr int64_t kWeightBytes = kWidth * kWidth * 4;  // of the widest layer; activations: 2 rows
  const auto largest_in_backward = [](auto model, World& world) {
    const Mesh mesh = world.mesh();
    Sharded sharded = fully_shard(model, mesh);
    kSquare(model, world.rank(), 0).backward();
    testing::descend(sharded);
    const at::Tensor loss = kSquare(model, world.rank(), 1);
    const testing::TensorAllocations allocations;
    loss.backward();
    return allocations.largest_bytes();
  };
  run_ranks(2, [&](World& world) {
    EXPECT_LT(largest_in_backward(build([=] { return DirectNet(kWidth); }), world), kWeightBytes);
  });
  // A model that hands its gradients over proves that this test can fail.
  run_ranks(2, [&](World& world) {
    EXPECT_GE(largest_in_backward(build([=] { return PlainNet(kWidth); }), world), kWeightBytes);
  });
}

TEST(DirectGradients, AddUpWhenALayerIsUsedTwiceInItsUnit) {
  struct TwiceImpl : torch::nn::Module {
    at::Tensor forward(const at::Tensor& x) { return linear(at::tanh(linear(x))); }
    nn::Linear linear = register_module("linear", nn::Linear(5, 5));
  };
  expect_trains_like_plain([] { return Unit<TwiceImpl>(); }, kSquare);
}

// --- unused and frozen ---------------------------------------------------------------------------

// A bank of experts in one unit; which of them compute is the caller's choice.
struct ExpertsImpl : torch::nn::Module {
  ExpertsImpl() {
    for (int i = 0; i < 3; ++i)
      experts.push_back(register_module("expert" + std::to_string(i), torch::nn::Linear(5, 5)));
  }
  at::Tensor forward(const at::Tensor& x, const std::vector<int64_t>& chosen) {
    at::Tensor y = x;
    for (const int64_t i : chosen) y = y + at::tanh(experts[static_cast<size_t>(i)](x));
    return y;
  }
  std::vector<torch::nn::Linear> experts;
};

struct MoeImpl : torch::nn::Module {
  at::Tensor forward(const at::Tensor& x, const std::vector<int64_t>& chosen) {
    return after(bank(before(x), chosen));
  }
  Unit<testing::Block> before = register_module("before", Unit<testing::Block>(5, 5));
  Unit<ExpertsImpl> bank = register_module("bank", Unit<ExpertsImpl>());
  Unit<testing::Block> after = register_module("after", Unit<testing::Block>(5, 3));
};
TORCH_MODULE(Moe);

TEST(UnusedParameters, ContributeZerosWhereRanksUseDifferentExperts) {
  // Rank 0 uses all experts, rank 1 only some, and other ones in every step: the ranks' reductions
  // must still come in the same order.
  const auto loss = [](Moe& model, int rank, int step) {
    std::vector<int64_t> chosen = {0, 1, 2};
    if (rank == 1) chosen = {step % 3};
    if (rank == 0 && step == 2) chosen = {};
    return model(input_for(rank, step), chosen).square().mean();
  };
  expect_trains_like_plain([] { return Moe(); }, loss);
}

TEST(UnusedParameters, HaveGradientsOfZero) {
  testing::on_sharded(
      2, [] { return Moe(); }, {},
      [](Moe& model, Sharded& sharded, int) {
        model(input_for(0, 0), std::vector<int64_t>{0, 1, 2})
            .sum()
            .backward();  // leaves old values in the slabs
        sharded.zero_grad();
        model(input_for(0, 0), std::vector<int64_t>{1}).sum().backward();
        EXPECT_TRUE(parameter_of(sharded, "bank.expert0.weight").gradient.eq(0).all().item<bool>());
        EXPECT_TRUE(parameter_of(sharded, "bank.expert2.bias").gradient.eq(0).all().item<bool>());
        const at::Tensor used = parameter_of(sharded, "bank.expert1.weight").gradient;
        EXPECT_TRUE(used.numel() == 0 || used.abs().sum().item<float>() > 0);
      });
}

struct AdapterImpl : torch::nn::Module {
  AdapterImpl()
      : base(register_module("base", torch::nn::Linear(5, 5))),
        adapter(register_module("adapter", torch::nn::Linear(5, 5))) {
    for (at::Tensor& parameter : base->parameters()) parameter.set_requires_grad(false);
  }
  at::Tensor forward(const at::Tensor& x) { return base(x) + at::tanh(adapter(x)); }
  torch::nn::Linear base;
  torch::nn::Linear adapter;
};

struct AdaptedImpl : torch::nn::Module {
  AdaptedImpl()
      : frozen(register_module("frozen", Unit<testing::Block>(5, 5))),
        mixed(register_module("mixed", Unit<AdapterImpl>())),
        head(register_module("head", Unit<testing::Block>(5, 3))) {
    for (at::Tensor& parameter : frozen->parameters()) parameter.set_requires_grad(false);
  }
  at::Tensor forward(const at::Tensor& x) { return head(mixed(frozen(x))); }
  Unit<testing::Block> frozen;
  Unit<AdapterImpl> mixed;
  Unit<testing::Block> head;
};
TORCH_MODULE(Adapted);

TEST(FrozenParameters, StayAsTheyAreWhileOthersTrain) {
  expect_trains_like_plain([] { return Adapted(); }, kSquare);
}

TEST(FrozenParameters, HaveNoGradientAndNoMainWeight) {
  run_ranks(2, [](World& world) {
    const Mesh mesh = world.mesh();
    Adapted model = build([] { return Adapted(); });
    model->to(at::kBFloat16);  // so that main weights are apart
    Sharded sharded =
        fully_shard(model, mesh, {.precision = {.main_storage = MainStorage::kSeparate}});
    const auto& units = EngineAccess::of(sharded).units();
    ASSERT_EQ(units[0]->groups().size(), 1u);
    ASSERT_EQ(units[1]->groups().size(), 2u) << "frozen and trainable members are two groups";
    for (const ParamGroup& group :
         {std::cref(units[0]->groups()[0]), std::cref(units[1]->groups()[0])}) {
      EXPECT_FALSE(group.is_trainable());
      for (const MainWeightPiece& piece : group.main_weights().pieces())
        EXPECT_FALSE(piece.main.defined()) << "no second copy";
      EXPECT_FALSE(group.slabs().gradient.has_value());
    }
    EXPECT_TRUE(units[1]->groups()[1].is_trainable());
    EXPECT_FALSE(parameter_of(sharded, "frozen.linear.weight").gradient.defined());
    EXPECT_FALSE(parameter_of(sharded, "frozen.linear.weight").is_trainable);
    EXPECT_TRUE(parameter_of(sharded, "mixed.adapter.weight").gradient.defined());
    int64_t trainable_bytes = 0;
    for (const FlatShard& shard : sharded.flat_shards()) trainable_bytes += shard.gradient.nbytes();
    EXPECT_EQ(sharded.memory().main_grad_bytes, trainable_bytes);
  });
}

// --- ties ----------------------------------------------------------------------------------------

// A linear layer that can use another module's weight.
struct SharingLinearImpl : torch::nn::LinearImpl {
  using torch::nn::LinearImpl::LinearImpl;
  void share(const at::Tensor& other) { weight = parameters_["weight"] = other; }
};
TORCH_MODULE(SharingLinear);

struct HeadImpl : torch::nn::Module {
  at::Tensor forward(const at::Tensor& x) { return projection(x); }
  SharingLinear projection = register_module("projection", SharingLinear(4, 8));
};

// An embedding unit whose weight the head unit uses, too.
struct TiedImpl : torch::nn::Module {
  TiedImpl()
      : embedding(register_module("embedding", Unit<torch::nn::Embedding>(8, 4))),
        block(register_module("block", Unit<testing::Block>(4, 4))),
        head(register_module("head", Unit<HeadImpl>())) {
    head->projection->share(embedding->weight);
  }
  at::Tensor forward(const at::Tensor& tokens) { return head(block(embedding(tokens))); }
  Unit<torch::nn::Embedding> embedding;
  Unit<testing::Block> block;
  Unit<HeadImpl> head;
};
TORCH_MODULE(Tied);

const auto kTokenLoss = [](auto& model, int rank, int step) {
  return model(tokens_for(rank, step)).square().mean();
};

TEST(TiedParameters, AreStoredOnceAndWholeWhileAnyUserComputes) {
  testing::on_sharded(
      2, [] { return Tied(); }, {},
      [](Tied& model, Sharded& sharded, int rank) {
        const ShardedParameter tied = parameter_of(sharded, "embedding.weight");
        EXPECT_THAT(tied.aliases, ElementsAre("head.projection.weight"));
        EXPECT_EQ(tied.unit, "embedding");
        int64_t weight_numel = 0;
        for (const ShardedParameter& each : sharded.parameters())
          weight_numel += c10::multiply_integers(each.shape);
        EXPECT_EQ(weight_numel, 8 * 4 + (4 * 4 + 4) + 8) << "embedding, block, the head's bias";
        testing::train(model, sharded, rank, 2, kTokenLoss);
        // In the second step the embedding is released after its own use and gathered for the head.
        EXPECT_EQ(EngineAccess::of(sharded).weights().num_misses(), 0);
        const StepOrder& order = EngineAccess::of(sharded).weights().order();
        EXPECT_EQ(order.forward, (std::vector<int32_t>{0, 1, 2, 0}));
      });
}

// A unit that holds embedding and head, tied.
struct TiedInsideImpl : torch::nn::Module {
  TiedInsideImpl()
      : embedding(register_module("embedding", torch::nn::Embedding(8, 4))),
        head(register_module("head", SharingLinear(4, 8))) {
    head->share(embedding->weight);
  }
  at::Tensor forward(const at::Tensor& tokens) { return head(embedding(tokens)); }
  torch::nn::Embedding embedding;
  SharingLinear head;
};

// fsdp::nn::Linear writes its part directly, the embedding's part comes through autograd.
struct TiedDirectImpl : torch::nn::Module {
  at::Tensor forward(const at::Tensor& tokens) {
    return nn::linear(embedding(tokens), embedding->weight, {});
  }
  torch::nn::Embedding embedding = register_module("embedding", torch::nn::Embedding(8, 4));
};

TEST(TiedParameters, TrainLikeAPlainModel) {
  expect_trains_like_plain([] { return Tied(); }, kTokenLoss);
  expect_trains_like_plain([] { return Unit<TiedInsideImpl>(); }, kTokenLoss);
  expect_trains_like_plain([] { return Unit<TiedDirectImpl>(); }, kTokenLoss);
}

// A unit under two names.
struct RegisteredTwiceImpl : torch::nn::Module {
  at::Tensor forward(const at::Tensor& x) { return last(again(first(x))); }
  Unit<testing::Block> first = register_module("first", Unit<testing::Block>(5, 5));
  Unit<testing::Block> again = register_module("again", first);
  Unit<testing::Block> last = register_module("last", Unit<testing::Block>(5, 3));
};
TORCH_MODULE(RegisteredTwice);

TEST(TiedParameters, OfAUnitRegisteredTwiceTrainLikeAPlainModel) {
  expect_trains_like_plain([] { return RegisteredTwice(); }, kSquare);
  testing::on_sharded(
      2, [] { return RegisteredTwice(); }, {},
      [](RegisteredTwice&, Sharded& sharded, int) {
        EXPECT_THAT(sharded.unit_names(), ElementsAre("first", "last")) << "one unit, two names";
        EXPECT_THAT(parameter_of(sharded, "first.linear.weight").aliases,
                    ElementsAre("again.linear.weight"));
      });
}

// Rank 1 does not begin its backward before that of rank 0 has returned.
TEST(CycleEnd, DoesNotHoldUpTheBackward) {
  std::atomic<bool> has_returned = false;
  on_sharded_chain(2, {.strategy = Strategy::optim, .precision = {.grad_comm = at::kBFloat16}},
                   [&](Chain& model, Sharded& sharded, int rank) {
                     const at::Tensor loss = kSquare(model, rank, 0);
                     if (rank == 1) has_returned.wait(false);
                     loss.backward();
                     has_returned = true;
                     has_returned.notify_all();
                     sharded.wait_gradients();
                   });
}

}  // namespace
}  // namespace fsdp::gradients_test
