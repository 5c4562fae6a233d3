// Forms of units: nested, in containers, with any arguments and sizes.
#include <gtest/gtest.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/container/sequential.h>

#include "fsdp/shard/engine/engine.h"
#include "support/run_ranks.h"
#include "support/trains_like_plain.h"

namespace fsdp::unit_forms_test {

// A result type of the user's own.
struct Hidden {
  at::Tensor state;
  at::Tensor gate;
  int depth = 0;
};

}  // namespace fsdp::unit_forms_test

template <>
struct fsdp::TensorFields<fsdp::unit_forms_test::Hidden> {
  static constexpr bool kKnown = true;
  static constexpr bool kHasTensors = true;
  static void visit(unit_forms_test::Hidden& hidden, const auto& visitor) {
    visitor(hidden.state);
    visitor(hidden.gate);
  }
};

namespace fsdp::unit_forms_test {
namespace {

using testing::Block;
using testing::build;
using testing::Chain;
using testing::expect_trains_like_plain;
using testing::input_for;
using testing::kSquare;
using testing::maker;
using testing::run_ranks;

// --- nesting -------------------------------------------------------------------------------------

struct InnermostImpl : torch::nn::Module {
  at::Tensor forward(const at::Tensor& x) { return at::tanh(linear(x)); }
  torch::nn::Linear linear = register_module("linear", torch::nn::Linear(5, 5));
};

struct MiddleImpl : torch::nn::Module {
  at::Tensor forward(const at::Tensor& x) { return x + after(inner(before(x))); }
  torch::nn::Linear before = register_module("before", torch::nn::Linear(5, 5));
  Unit<InnermostImpl> inner = register_module("inner", Unit<InnermostImpl>());
  torch::nn::Linear after = register_module("after", torch::nn::Linear(5, 5));
};

struct OuterImpl : torch::nn::Module {
  at::Tensor forward(const at::Tensor& x) { return last(second(first(x * scale)) * scale); }
  at::Tensor scale = register_parameter("scale", at::full({5}, 0.9));
  Unit<MiddleImpl> first = register_module("first", Unit<MiddleImpl>());
  Unit<MiddleImpl> second = register_module("second", Unit<MiddleImpl>());
  torch::nn::Linear last = register_module("last", torch::nn::Linear(5, 3));
};

TEST(UnitForms, NestedThreeDeepWithTheRootAsAUnitTrainLikeAPlainModel) {
  expect_trains_like_plain([] { return Unit<OuterImpl>(); }, kSquare);
}

struct OutsideImpl : torch::nn::Module {
  at::Tensor forward(const at::Tensor& x) {
    return second(between(first(x * scale)) * scale) * scale.sum();
  }
  at::Tensor scale = register_parameter("scale", at::full({5}, 0.9));
  Unit<Block> first = register_module("first", Unit<Block>(5, 5));
  torch::nn::Linear between = register_module("between", torch::nn::Linear(5, 5));
  Unit<Block> second = register_module("second", Unit<Block>(5, 3));
};

TEST(UnitForms, BesideParametersOutsideUnitsTrainLikeAPlainModel) {
  expect_trains_like_plain(maker<OutsideImpl>(), kSquare);
}

TEST(UnitForms, AreNotNeededAtAll) {
  expect_trains_like_plain([] { return torch::nn::Linear(5, 3); }, kSquare);
}

// --- containers ----------------------------------------------------------------------------------

// A list of units, a sequential of units, and a unit that is a sequential.
struct ContainersImpl : torch::nn::Module {
  ContainersImpl()
      : list(register_module("list", torch::nn::ModuleList())),
        several(register_module("several",
                                torch::nn::Sequential(Unit<Block>(5, 7), Unit<Block>(7, 5)))),
        one(register_module("one", Unit<torch::nn::Sequential>(Block(5, 7), Block(7, 3)))) {
    for (int i = 0; i < 2; ++i) list->push_back(Unit<Block>(5, 5));
  }
  at::Tensor forward(at::Tensor x) {
    for (const auto& each : *list) x = each->as<Unit<Block>::ContainedType>()->forward(x);
    return one(several->forward(x));
  }
  torch::nn::ModuleList list;
  torch::nn::Sequential several;
  Unit<torch::nn::Sequential> one;
};

TEST(UnitForms, InContainersTrainLikeAPlainModel) {
  expect_trains_like_plain(maker<ContainersImpl>(), kSquare);
}

// --- forwards ------------------------------------------------------------------------------------

struct DefaultsImpl : torch::nn::Module {
  at::Tensor forward(const at::Tensor& x, double factor = 0.5,
                     const std::optional<at::Tensor>& extra = std::nullopt) {
    const at::Tensor y = at::tanh(linear(x)) * factor;
    return extra ? y + *extra : y;
  }
  torch::nn::Linear linear = register_module("linear", torch::nn::Linear(5, 5));
};

struct OverloadedImpl : torch::nn::Module {
  at::Tensor forward(const at::Tensor& x) { return linear(x); }
  at::Tensor forward(const at::Tensor& x, double factor) { return at::tanh(linear(x)) * factor; }
  torch::nn::Linear linear = register_module("linear", torch::nn::Linear(5, 5));
};

struct ForwardsImpl : torch::nn::Module {
  ForwardsImpl()
      : one(register_module("one", Unit<DefaultsImpl>())),
        two(register_module("two", Unit<DefaultsImpl>())),
        plain(register_module("plain", Unit<OverloadedImpl, at::Tensor(const at::Tensor&)>())),
        scaled(register_module("scaled", Unit<OverloadedImpl, at::Tensor(at::Tensor, double)>())) {}
  at::Tensor forward(const at::Tensor& x) {
    return scaled(plain(two(one(x), 2, x) + two(one(x), 0.25)), 0.5);
  }
  Unit<DefaultsImpl> one, two;
  Unit<OverloadedImpl, at::Tensor(const at::Tensor&)> plain;
  Unit<OverloadedImpl, at::Tensor(at::Tensor, double)> scaled;
};

TEST(UnitForms, WithDefaultArgumentsOrOneOfSeveralForwardsTrainLikeAPlainModel) {
  expect_trains_like_plain(maker<ForwardsImpl>(), kSquare);
}

TEST(UnitForms, TakeTheModulesOwnDefaults) {
  DefaultsImpl plain;
  Unit<DefaultsImpl> unit;
  unit->linear->weight.set_data(plain.linear->weight);
  unit->linear->bias.set_data(plain.linear->bias);
  const at::Tensor x = input_for(0, 0);
  EXPECT_TRUE(unit(x).equal(plain.forward(x)));
  EXPECT_TRUE(unit(x, 3.0).equal(plain.forward(x, 3.0)));
  EXPECT_TRUE(unit->forward(x, 3.0, x).equal(plain.forward(x, 3.0, x)));
}

// --- what goes in and out ------------------------------------------------------------------------

struct TupleImpl : torch::nn::Module {
  std::tuple<at::Tensor, std::optional<at::Tensor>, int> forward(at::Tensor x,
                                                                 std::optional<at::Tensor> extra) {
    at::Tensor y = linear(x);
    if (extra) y = y + *extra;
    return {at::tanh(y), extra ? std::optional(y * *extra) : std::nullopt, 3};
  }
  torch::nn::Linear linear = register_module("linear", torch::nn::Linear(5, 5));
};

struct VectorImpl : torch::nn::Module {
  std::vector<at::Tensor> forward(const std::vector<at::Tensor>& parts) {
    return linear(parts[0] + parts[1]).chunk(2, -1);
  }
  torch::nn::Linear linear = register_module("linear", torch::nn::Linear(5, 10));
};

struct StructImpl : torch::nn::Module {
  Hidden forward(Hidden hidden, double factor) {
    const at::Tensor y = linear(hidden.state) * factor;
    return {at::tanh(y), hidden.gate * y, hidden.depth + 1};
  }
  torch::nn::Linear linear = register_module("linear", torch::nn::Linear(5, 5));
};

struct MixedImpl : torch::nn::Module {
  at::Tensor forward(const at::Tensor& x) {
    auto [a, none, number] = one(x, std::nullopt);
    auto [b, product, same] = two(a, x);
    EXPECT_TRUE(!none && product && number == same);
    std::vector<at::Tensor> parts = three(std::vector<at::Tensor>{b, *product});
    const Hidden hidden = four(Hidden{parts[0], parts[1], 1}, 0.5);
    EXPECT_EQ(hidden.depth, 2);
    return hidden.state + hidden.gate;
  }
  Unit<TupleImpl> one = register_module("one", Unit<TupleImpl>());
  Unit<TupleImpl> two = register_module("two", Unit<TupleImpl>());
  Unit<VectorImpl> three = register_module("three", Unit<VectorImpl>());
  Unit<StructImpl> four = register_module("four", Unit<StructImpl>());
};

TEST(UnitForms, WithTuplesOptionalsVectorsAndStructsTrainLikeAPlainModel) {
  expect_trains_like_plain(maker<MixedImpl>(), kSquare);
}

TEST(UnitForms, MayChangeTheirInputInPlace) {
  struct InPlaceImpl : torch::nn::Module {
    at::Tensor forward(at::Tensor x) {
      x.mul_(0.5).add_(1.0);
      return linear(x);
    }
    torch::nn::Linear linear = register_module("linear", torch::nn::Linear(5, 5));
  };
  struct HolderImpl : torch::nn::Module {
    HolderImpl() {
      for (int i = 0; i < 5; ++i)
        units.push_back(register_module("unit" + std::to_string(i), Unit<InPlaceImpl>()));
    }
    at::Tensor forward(const at::Tensor& x) {
      at::Tensor y = at::tanh(x.clone());
      for (Unit<InPlaceImpl>& unit : units) {
        const at::Tensor z = unit(y);
        y = y.sin() + z;  // the caller sees the change
      }
      return y;
    }
    std::vector<Unit<InPlaceImpl>> units;
  };
  expect_trains_like_plain(maker<HolderImpl>(), kSquare);
  // Their weights are released in time nevertheless.
  testing::on_sharded(2, maker<HolderImpl>(), {}, [](auto& model, Sharded& sharded, int rank) {
    for (int step = 0; step < 3; ++step) {
      kSquare(model, rank, step).backward();
      testing::descend(sharded);
    }
    EXPECT_EQ(EngineAccess::of(sharded).weights().num_misses(), 0);
  });
}

struct WrapperImpl : torch::nn::Module {
  at::Tensor forward(const at::Tensor& x) { return inner(at::tanh(own(x))); }
  torch::nn::Linear own = register_module("own", torch::nn::Linear(5, 5));
  Unit<torch::nn::Linear> inner = register_module("inner", Unit<torch::nn::Linear>(5, 5));
};

struct WrappersImpl : torch::nn::Module {
  at::Tensor forward(const at::Tensor& x) {
    at::Tensor y = first(x);
    y.mul_(0.5);
    y = second(y);
    return third(y.add_(x).sigmoid_());
  }
  Unit<WrapperImpl> first = register_module("first", Unit<WrapperImpl>());
  Unit<WrapperImpl> second = register_module("second", Unit<WrapperImpl>());
  Unit<Block> third = register_module("third", Unit<Block>(5, 3));
};

// The whole model is a unit, so that the wrappers do not stay whole for the backward.
TEST(UnitForms, MayReturnWhatAUnitInsideReturnedAndHaveItChangedInPlace) {
  expect_trains_like_plain([] { return Unit<WrappersImpl>(); }, kSquare);
  expect_trains_like_plain(maker<WrappersImpl>(), kSquare);
}

// --- sizes ---------------------------------------------------------------------------------------

struct EmptyImpl : torch::nn::Module {
  at::Tensor forward(const at::Tensor& x) { return x + nothing.sum(); }
  at::Tensor nothing = register_parameter("nothing", at::empty({0, 5}));
};

struct BesideEmptyImpl : torch::nn::Module {
  at::Tensor forward(const at::Tensor& x) { return empty->forward(linear(x)); }
  std::shared_ptr<EmptyImpl> empty = register_module("empty", std::make_shared<EmptyImpl>());
  torch::nn::Linear linear = register_module("linear", torch::nn::Linear(5, 5));
};

struct EmptiesImpl : torch::nn::Module {
  at::Tensor forward(const at::Tensor& x) { return second(first(x)); }
  Unit<BesideEmptyImpl> first = register_module("first", Unit<BesideEmptyImpl>());
  Unit<EmptyImpl> second = register_module("second", Unit<EmptyImpl>());
};

TEST(UnitForms, WithParametersOfNoElementsTrainLikeAPlainModel) {
  expect_trains_like_plain(maker<EmptiesImpl>(), kSquare);
}

TEST(UnitForms, OnMoreRanksThanElementsTrainLikeAPlainModel) {
  const auto make = [] { return Unit<Block>(1, 1); };
  const auto loss = [](auto& model, int rank, int step) {
    return model(input_for(rank, step, {3, 1})).square().mean();
  };
  const auto expected = testing::train_plain(build(make), 5, 3, loss);
  for (const Strategy& strategy : {Strategy::optim, Strategy::optim_grads_params}) {
    testing::on_sharded(
        5, make, {.strategy = strategy}, [&](auto& model, Sharded& sharded, int rank) {
          testing::train(model, sharded, rank, 3, loss);
          testing::expect_close(testing::weights_of(sharded, model), expected, to_text(strategy));
        });
  }
}

TEST(UnitForms, OfHundredsOfUnitsTrainLikeAPlainModel) {
  const auto expected = testing::train_plain(build([] { return Chain(200); }), 2, 2, kSquare);
  testing::on_sharded(
      2, [] { return Chain(200); }, {},
      [&](Chain& model, Sharded& sharded, int rank) {
        testing::train(model, sharded, rank, 2, kSquare);
        EXPECT_EQ(EngineAccess::of(sharded).weights().num_misses(), 0);
        testing::expect_close(testing::weights_of(sharded, model), expected);
      });
}

}  // namespace
}  // namespace fsdp::unit_forms_test
