// The way of a sharded model's gradients: slabs, zeros, sums of several uses.
#include <c10/util/accumulate.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/embedding.h>

#include <chrono>

#include "fsdp/nn/layers/linear.h"
#include "fsdp/shard/engine/engine.h"
#include "support/run_ranks.h"
#include "support/sharded_training.h"
#include "support/watched_memory.h"

namespace fsdp::gradients_test {
namespace {

using testing::build;
using testing::Chain;
using ::testing::ElementsAre;
using testing::input_for;
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

template <typename Make, typename Loss>
void expect_trains_like_plain(const Make& make, const Loss& loss,
                              const std::vector<Strategy>& strategies = kStrategies) {
  for (const int ranks : {1, 2}) {
    const auto expected = testing::train_plain(build(make), ranks, 3, loss);
    for (const Strategy& strategy : strategies)
      run_ranks(ranks, [&](World& world) {
        const Mesh mesh = world.mesh();
        auto model = build(make);
        Sharded sharded = fully_shard(model, mesh, {.strategy = strategy});
        testing::train(model, sharded, world.rank(), 3, loss);
        testing::expect_close(testing::weights_of(sharded, model), expected,
                              to_text(strategy) + " on " + std::to_string(ranks));
      });
  }
}

TEST(Gradients, LeaveTheParametersAsSoonAsTheyAreThere) {
  on_sharded_chain(2, {}, [](Chain& model, Sharded& sharded, int rank) {
    model(input_for(rank, 0)).sum().backward();
    for (const at::Tensor& parameter : model->parameters())
      EXPECT_NE(testing::error_of([&] { parameter.grad().sum(); }), "") << "there is memory";
    for (const FlatShard& shard : sharded.flat_shards())
      EXPECT_NE(shard.gradient.abs().sum().item<float>(), 0.0f);
  });
}

// --- direct writes -------------------------------------------------------------------------------

struct DirectBlockImpl : torch::nn::Module {
  DirectBlockImpl(int64_t in, int64_t out)
      : linear(register_module("linear", nn::Linear(in, out))) {}
  at::Tensor forward(const at::Tensor& x) { return at::tanh(linear(x)); }
  nn::Linear linear;
};
TORCH_MODULE(DirectBlock);

struct DirectNetImpl : torch::nn::Module {
  explicit DirectNetImpl(int64_t width)
      : first(register_module("first", Unit<DirectBlock>(5, width))),
        second(register_module("second", Unit<DirectBlock>(width, width))),
        third(register_module("third", Unit<DirectBlock>(width, 3))) {}
  at::Tensor forward(const at::Tensor& x) { return third(second(first(x))); }
  Unit<DirectBlock> first;
  Unit<DirectBlock> second;
  Unit<DirectBlock> third;
};
TORCH_MODULE(DirectNet);

struct PlainNetImpl : torch::nn::Module {
  explicit PlainNetImpl(int64_t width)
      : first(register_module("first", testing::Block(5, width))),
        second(register_module("second", testing::Block(width, width))),
        third(register_module("third", testing::Block(width, 3))) {}
  at::Tensor forward(const at::Tensor& x) { return third(second(first(x))); }
  testing::Block first;
  testing::Block second;
  testing::Block third;
};
TORCH_MODULE(PlainNet);

const auto kSquare = [](auto& model, int rank, int step) {
  return model(input_for(rank, step)).square().mean();
};

TEST(DirectGradients, EqualThoseOfLibtorchsLinear) {
  for (const int ranks : {1, 2}) {
    const auto expected =
        testing::train_plain(build([] { return PlainNet(9); }), ranks, 3, kSquare);
    for (const Strategy& strategy : kStrategies)
      run_ranks(ranks, [&](World& world) {
        const Mesh mesh = world.mesh();
        DirectNet model = build([] { return DirectNet(9); });
        Sharded sharded = fully_shard(model, mesh, {.strategy = strategy});
        testing::train(model, sharded, world.rank(), 3, kSquare);
        testing::expect_equal(testing::weights_of(sharded, model), expected, to_text(strategy));
      });
  }
}

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
  struct HandedOverImpl : torch::nn::Module {
    HandedOverImpl() : only(register_module("only", Unit<testing::Block>(5, 1000))) {}
    at::Tensor forward(const at::Tensor& x) { return only(x); }
    Unit<testing::Block> only;
  };
  run_ranks(2, [&](World& world) {
    torch::nn::ModuleHolder<HandedOverImpl> model(
        build([] { return std::make_shared<HandedOverImpl>(); }));
    EXPECT_GE(largest_in_backward(model, world), 5 * 1000 * 4);
  });
}

TEST(DirectGradients, AddUpWhenALayerIsUsedTwiceInItsUnit) {
  struct TwiceImpl : torch::nn::Module {
    TwiceImpl() : linear(register_module("linear", nn::Linear(5, 5))) {}
    at::Tensor forward(const at::Tensor& x) { return linear(at::tanh(linear(x))); }
    nn::Linear linear;
  };
  struct NetImpl : torch::nn::Module {
    NetImpl() : twice(register_module("twice", Unit<TwiceImpl>())) {}
    at::Tensor forward(const at::Tensor& x) { return twice(x); }
    Unit<TwiceImpl> twice;
  };
  using Net = torch::nn::ModuleHolder<NetImpl>;
  expect_trains_like_plain([] { return Net(std::make_shared<NetImpl>()); }, kSquare);
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
  MoeImpl()
      : before(register_module("before", Unit<testing::Block>(5, 5))),
        bank(register_module("bank", Unit<ExpertsImpl>())),
        after(register_module("after", Unit<testing::Block>(5, 3))) {}
  at::Tensor forward(const at::Tensor& x, const std::vector<int64_t>& chosen) {
    return after(bank(before(x), chosen));
  }
  Unit<testing::Block> before;
  Unit<ExpertsImpl> bank;
  Unit<testing::Block> after;
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
  run_ranks(2, [](World& world) {
    const Mesh mesh = world.mesh();
    Moe model = build([] { return Moe(); });
    Sharded sharded = fully_shard(model, mesh);
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
  HeadImpl() : projection(register_module("projection", SharingLinear(4, 8))) {}
  at::Tensor forward(const at::Tensor& x) { return projection(x); }
  SharingLinear projection;
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

TEST(TiedParameters, OfTwoUnitsTrainLikeAPlainModel) {
  expect_trains_like_plain([] { return Tied(); }, kTokenLoss);
}

TEST(TiedParameters, AreStoredOnceAndWholeWhileAnyUserComputes) {
  run_ranks(2, [](World& world) {
    const Mesh mesh = world.mesh();
    Tied model = build([] { return Tied(); });
    Sharded sharded = fully_shard(model, mesh);
    const ShardedParameter tied = parameter_of(sharded, "embedding.weight");
    EXPECT_THAT(tied.aliases, ElementsAre("head.projection.weight"));
    EXPECT_EQ(tied.unit, "embedding");
    int64_t weight_numel = 0;
    for (const ShardedParameter& each : sharded.parameters())
      weight_numel += c10::multiply_integers(each.shape);
    EXPECT_EQ(weight_numel, 8 * 4 + (4 * 4 + 4) + 8) << "embedding, block, the head's bias";
    testing::train(model, sharded, world.rank(), 2, kTokenLoss);
    // In the second step the embedding is released after its own use and gathered for the head.
    EXPECT_EQ(EngineAccess::of(sharded).slabs().num_misses(), 0);
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

struct TiedInsideNetImpl : torch::nn::Module {
  TiedInsideNetImpl() : all(register_module("all", Unit<TiedInsideImpl>())) {}
  at::Tensor forward(const at::Tensor& tokens) { return all(tokens); }
  Unit<TiedInsideImpl> all;
};
TORCH_MODULE(TiedInsideNet);

TEST(TiedParameters, InsideOneUnitTrainLikeAPlainModel) {
  expect_trains_like_plain([] { return TiedInsideNet(); }, kTokenLoss);
}

// fsdp::nn::Linear writes its part directly, the embedding's part comes through autograd.
struct TiedDirectImpl : torch::nn::Module {
  TiedDirectImpl() : embedding(register_module("embedding", torch::nn::Embedding(8, 4))) {}
  at::Tensor forward(const at::Tensor& tokens) {
    return nn::linear(embedding(tokens), embedding->weight, {});
  }
  torch::nn::Embedding embedding;
};

struct TiedDirectNetImpl : torch::nn::Module {
  TiedDirectNetImpl() : all(register_module("all", Unit<TiedDirectImpl>())) {}
  at::Tensor forward(const at::Tensor& tokens) { return all(tokens); }
  Unit<TiedDirectImpl> all;
};
TORCH_MODULE(TiedDirectNet);

TEST(TiedParameters, AddWhatWasWrittenDirectlyToWhatCameThroughAutograd) {
  expect_trains_like_plain([] { return TiedDirectNet(); }, kTokenLoss);
}

// The same unit under two names.
struct RegisteredTwiceImpl : torch::nn::Module {
  RegisteredTwiceImpl()
      : first(register_module("first", Unit<testing::Block>(5, 5))),
        again(register_module("again", first)),
        last(register_module("last", Unit<testing::Block>(5, 3))) {}
  at::Tensor forward(const at::Tensor& x) { return last(again(first(x))); }
  Unit<testing::Block> first;
  Unit<testing::Block> again;
  Unit<testing::Block> last;
};
TORCH_MODULE(RegisteredTwice);

TEST(TiedParameters, OfAUnitRegisteredTwiceTrainLikeAPlainModel) {
  expect_trains_like_plain([] { return RegisteredTwice(); }, kSquare);
  run_ranks(2, [](World& world) {
    const Mesh mesh = world.mesh();
    RegisteredTwice model = build([] { return RegisteredTwice(); });
    Sharded sharded = fully_shard(model, mesh);
    EXPECT_THAT(sharded.unit_names(), ElementsAre("first", "last")) << "one unit, two names";
    EXPECT_THAT(parameter_of(sharded, "first.linear.weight").aliases,
                ElementsAre("again.linear.weight"));
  });
}

// A network on which a unit's reduction takes a tenth of a second, with a cast before each: the
// cycle's last reductions may go on until somebody wants the gradients.
TEST(CycleEnd, DoesNotHoldUpTheBackward) {
  for (const char* strategy : {"optim_grads_params", "optim_grads_params+hfsdp", "optim"}) {
    SCOPED_TRACE(strategy);
    run_threads(2, {.timeout_seconds = 60, .bandwidth_bytes_per_s = 1120}, [&](World& world) {
      using Clock = std::chrono::steady_clock;
      const Mesh mesh = world.mesh({.outer = 2});
      Chain model = build([] { return Chain(5); });
      const Sharded sharded = fully_shard(model, mesh,
                                          {.strategy = parse_strategy(strategy),
                                           .precision = {.grad_comm = at::kBFloat16},
                                           .initial_values = InitialValues::kOfEveryRank});
      const at::Tensor loss = model->forward(input_for(world.rank(), 0)).square().mean();
      const Clock::time_point begin = Clock::now();
      loss.backward();
      const Clock::duration backward = Clock::now() - begin;
      sharded.wait_gradients();
      EXPECT_LT(backward, (Clock::now() - begin) / 2);
    });
  }
}

}  // namespace
}  // namespace fsdp::gradients_test
