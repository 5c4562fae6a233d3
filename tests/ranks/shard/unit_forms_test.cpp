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
  InnermostImpl() : linear(register_module("linear", torch::nn::Linear(5, 5))) {}
  at::Tensor forward(const at::Tensor& x) { return at::tanh(linear(x)); }
  torch::nn::Linear linear;
};

struct MiddleImpl : torch::nn::Module {
  MiddleImpl()
      : before(register_module("before", torch::nn::Linear(5, 5))),
        inner(register_module("inner", Unit<InnermostImpl>())),
        after(register_module("after", torch::nn::Linear(5, 5))) {}
  at::Tensor forward(const at::Tensor& x) { return x + after(inner(before(x))); }
  torch::nn::Linear before;
  Unit<InnermostImpl> inner;
  torch::nn::Linear after;
};

struct OuterImpl : torch::nn::Module {
  OuterImpl()
      : scale(register_parameter("scale", at::full({5}, 0.9))),
        first(register_module("first", Unit<MiddleImpl>())),
        second(register_module("second", Unit<MiddleImpl>())),
        last(register_module("last", torch::nn::Linear(5, 3))) {}
  at::Tensor forward(const at::Tensor& x) { return last(second(first(x * scale)) * scale); }
  at::Tensor scale;
  Unit<MiddleImpl> first;
  Unit<MiddleImpl> second;
  torch::nn::Linear last;
};

TEST(UnitForms, NestedThreeDeepWithTheRootAsAUnitTrainLikeAPlainModel) {
  expect_trains_like_plain(
      [] { return Unit<OuterImpl>(); },
      [](Unit<OuterImpl>& model, int rank, int step) { return kSquare(model, rank, step); });
}

struct OutsideImpl : torch::nn::Module {
  OutsideImpl()
      : scale(register_parameter("scale", at::full({5}, 0.9))),
        first(register_module("first", Unit<Block>(5, 5))),
        between(register_module("between", torch::nn::Linear(5, 5))),
        second(register_module("second", Unit<Block>(5, 3))) {}
  at::Tensor forward(const at::Tensor& x) {
    return second(between(first(x * scale)) * scale) * scale.sum();
  }
  at::Tensor scale;
  Unit<Block> first;
  torch::nn::Linear between;
  Unit<Block> second;
};

TEST(UnitForms, BesideParametersOutsideUnitsTrainLikeAPlainModel) {
  expect_trains_like_plain(maker<OutsideImpl>(), kSquare);
}

TEST(UnitForms, AreNotNeededAtAll) {
  expect_trains_like_plain([] { return torch::nn::Linear(5, 3); }, kSquare);
}

// --- containers ----------------------------------------------------------------------------------

TEST(UnitForms, InSequentialTrainLikeAPlainModel) {
  expect_trains_like_plain(
      [] { return torch::nn::Sequential(Unit<Block>(5, 7), Unit<Block>(7, 7), Unit<Block>(7, 3)); },
      [](torch::nn::Sequential& model, int rank, int step) {
        return model->forward(input_for(rank, step)).square().mean();
      });
}

struct ListedImpl : torch::nn::Module {
  ListedImpl() : list(register_module("list", torch::nn::ModuleList())) {
    for (int i = 0; i < 3; ++i) list->push_back(Unit<Block>(5, 5));
  }
  at::Tensor forward(at::Tensor x) {
    for (const auto& each : *list) x = each->as<Unit<Block>::ContainedType>()->forward(x);
    return x;
  }
  torch::nn::ModuleList list;
};

TEST(UnitForms, InModuleListTrainLikeAPlainModel) {
  expect_trains_like_plain(maker<ListedImpl>(), kSquare);
}

TEST(UnitForms, OfASequentialTrainLikeAPlainModel) {
  struct NetImpl : torch::nn::Module {
    NetImpl()
        : first(register_module("first", Unit<torch::nn::Sequential>(Block(5, 7), Block(7, 5)))),
          last(register_module("last", Unit<Block>(5, 3))) {}
    at::Tensor forward(const at::Tensor& x) { return last(first(x)); }
    Unit<torch::nn::Sequential> first;
    Unit<Block> last;
  };
  expect_trains_like_plain(maker<NetImpl>(), kSquare);
}

// --- forwards ------------------------------------------------------------------------------------

struct DefaultsImpl : torch::nn::Module {
  DefaultsImpl() : linear(register_module("linear", torch::nn::Linear(5, 5))) {}
  at::Tensor forward(const at::Tensor& x, double factor = 0.5,
                     const std::optional<at::Tensor>& extra = std::nullopt) {
    const at::Tensor y = at::tanh(linear(x)) * factor;
    return extra ? y + *extra : y;
  }
  torch::nn::Linear linear;
};

struct CallsDefaultsImpl : torch::nn::Module {
  CallsDefaultsImpl()
      : one(register_module("one", Unit<DefaultsImpl>())),
        two(register_module("two", Unit<DefaultsImpl>())) {}
  at::Tensor forward(const at::Tensor& x) { return two(one(x), 2, x) + two(one(x), 0.25); }
  Unit<DefaultsImpl> one;
  Unit<DefaultsImpl> two;
};

TEST(UnitForms, WithDefaultArgumentsTrainLikeAPlainModel) {
  expect_trains_like_plain(maker<CallsDefaultsImpl>(), kSquare);
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

struct OverloadedImpl : torch::nn::Module {
  OverloadedImpl() : linear(register_module("linear", torch::nn::Linear(5, 5))) {}
  at::Tensor forward(const at::Tensor& x) { return linear(x); }
  at::Tensor forward(const at::Tensor& x, double factor) { return at::tanh(linear(x)) * factor; }
  torch::nn::Linear linear;
};

TEST(UnitForms, OfOneOfSeveralForwardsTrainLikeAPlainModel) {
  struct NetImpl : torch::nn::Module {
    NetImpl()
        : one(register_module("one", Unit<OverloadedImpl, at::Tensor(const at::Tensor&)>())),
          two(register_module("two", Unit<OverloadedImpl, at::Tensor(at::Tensor, double)>())) {}
    at::Tensor forward(const at::Tensor& x) { return two(one(x), 0.5); }
    Unit<OverloadedImpl, at::Tensor(const at::Tensor&)> one;
    Unit<OverloadedImpl, at::Tensor(at::Tensor, double)> two;
  };
  expect_trains_like_plain(maker<NetImpl>(), kSquare);
}

// --- what goes in and out ------------------------------------------------------------------------

struct TupleImpl : torch::nn::Module {
  TupleImpl() : linear(register_module("linear", torch::nn::Linear(5, 5))) {}
  std::tuple<at::Tensor, std::optional<at::Tensor>, int> forward(at::Tensor x,
                                                                 std::optional<at::Tensor> extra) {
    at::Tensor y = linear(x);
    if (extra) y = y + *extra;
    return {at::tanh(y), extra ? std::optional(y * *extra) : std::nullopt, 3};
  }
  torch::nn::Linear linear;
};

struct VectorImpl : torch::nn::Module {
  VectorImpl() : linear(register_module("linear", torch::nn::Linear(5, 10))) {}
  std::vector<at::Tensor> forward(const std::vector<at::Tensor>& parts) {
    return linear(parts[0] + parts[1]).chunk(2, -1);
  }
  torch::nn::Linear linear;
};

struct StructImpl : torch::nn::Module {
  StructImpl() : linear(register_module("linear", torch::nn::Linear(5, 5))) {}
  Hidden forward(Hidden hidden, double factor) {
    const at::Tensor y = linear(hidden.state) * factor;
    return {at::tanh(y), hidden.gate * y, hidden.depth + 1};
  }
  torch::nn::Linear linear;
};

struct MixedImpl : torch::nn::Module {
  MixedImpl()
      : one(register_module("one", Unit<TupleImpl>())),
        two(register_module("two", Unit<TupleImpl>())),
        three(register_module("three", Unit<VectorImpl>())),
        four(register_module("four", Unit<StructImpl>())) {}
  at::Tensor forward(const at::Tensor& x) {
    auto [a, none, number] = one(x, std::nullopt);
    auto [b, product, same] = two(a, x);
    EXPECT_TRUE(!none && product && number == same);
    std::vector<at::Tensor> parts = three(std::vector<at::Tensor>{b, *product});
    const Hidden hidden = four(Hidden{parts[0], parts[1], 1}, 0.5);
    EXPECT_EQ(hidden.depth, 2);
    return hidden.state + hidden.gate;
  }
  Unit<TupleImpl> one;
  Unit<TupleImpl> two;
  Unit<VectorImpl> three;
  Unit<StructImpl> four;
};

TEST(UnitForms, WithTuplesOptionalsVectorsAndStructsTrainLikeAPlainModel) {
  expect_trains_like_plain(maker<MixedImpl>(), kSquare);
}

TEST(UnitForms, MayChangeTheirInputInPlace) {
  struct InPlaceImpl : torch::nn::Module {
    InPlaceImpl() : linear(register_module("linear", torch::nn::Linear(5, 5))) {}
    at::Tensor forward(at::Tensor x) {
      x.mul_(0.5).add_(1.0);
      return linear(x);
    }
    torch::nn::Linear linear;
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
        most_whole = 0;
        y = y.sin() + z;  // the caller sees the change
      }
      return y;
    }
    std::vector<Unit<InPlaceImpl>> units;
    int most_whole = 0;
  };
  expect_trains_like_plain(maker<HolderImpl>(), kSquare);
  // Their weights are released in time nevertheless.
  run_ranks(2, [](World& world) {
    const Mesh mesh = world.mesh();
    auto model = build(maker<HolderImpl>());
    Sharded sharded = fully_shard(model, mesh);
    for (int step = 0; step < 3; ++step) {
      kSquare(model, world.rank(), step).backward();
      testing::descend(sharded);
    }
    EXPECT_EQ(EngineAccess::of(sharded).slabs().num_misses(), 0);
  });
}

TEST(UnitForms, MayHaveTheirOutputChangedInPlace) {
  struct ShapedImpl : torch::nn::Module {
    ShapedImpl() : linear(register_module("linear", torch::nn::Linear(5, 5))) {}
    at::Tensor forward(const at::Tensor& x) {
      return linear(x.view({-1, 5})).view({1, -1, 5}).transpose(0, 1);
    }
    torch::nn::Linear linear;
  };
  struct HolderImpl : torch::nn::Module {
    HolderImpl()
        : first(register_module("first", Unit<ShapedImpl>())),
          second(register_module("second", Unit<torch::nn::Linear>(5, 5))),
          third(register_module("third", Unit<ShapedImpl>())) {}
    at::Tensor forward(const at::Tensor& x) {
      at::Tensor y = first(x);
      y.mul_(0.5);
      y = second(y);
      y.add_(x.view_as(y)).sigmoid_();
      y = third(y.contiguous());
      return y.relu_();
    }
    Unit<ShapedImpl> first;
    Unit<torch::nn::Linear> second;
    Unit<ShapedImpl> third;
  };
  expect_trains_like_plain(maker<HolderImpl>(), kSquare);
}

struct WrapperImpl : torch::nn::Module {
  WrapperImpl()
      : own(register_module("own", torch::nn::Linear(5, 5))),
        inner(register_module("inner", Unit<torch::nn::Linear>(5, 5))) {}
  at::Tensor forward(const at::Tensor& x) { return inner(at::tanh(own(x))); }
  torch::nn::Linear own;
  Unit<torch::nn::Linear> inner;
};

struct WrappersImpl : torch::nn::Module {
  WrappersImpl()
      : first(register_module("first", Unit<WrapperImpl>())),
        second(register_module("second", Unit<WrapperImpl>())),
        third(register_module("third", Unit<Block>(5, 3))) {}
  at::Tensor forward(const at::Tensor& x) {
    at::Tensor y = first(x);
    y.mul_(0.5);
    y = second(y);
    return third(y.add_(x).sigmoid_());
  }
  Unit<WrapperImpl> first;
  Unit<WrapperImpl> second;
  Unit<Block> third;
};

// The whole model is a unit, so that the wrappers do not stay whole for the backward.
TEST(UnitForms, MayReturnWhatAUnitInsideReturnedAndHaveItChangedInPlace) {
  expect_trains_like_plain([] { return Unit<WrappersImpl>(); }, kSquare);
  expect_trains_like_plain(maker<WrappersImpl>(), kSquare);
}

TEST(UnitForms, MayReturnTheirInput) {
  struct PassingImpl : torch::nn::Module {
    PassingImpl() : linear(register_module("linear", torch::nn::Linear(5, 5))) {}
    std::tuple<at::Tensor, at::Tensor> forward(const at::Tensor& x) { return {x, linear(x)}; }
    torch::nn::Linear linear;
  };
  struct HolderImpl : torch::nn::Module {
    HolderImpl()
        : first(register_module("first", Unit<Block>(5, 5))),
          passing(register_module("passing", Unit<PassingImpl>())),
          last(register_module("last", Unit<Block>(5, 3))) {}
    at::Tensor forward(const at::Tensor& x) {
      const auto [same, other] = passing(first(x));
      return last(same + other.sin());
    }
    Unit<Block> first;
    Unit<PassingImpl> passing;
    Unit<Block> last;
  };
  expect_trains_like_plain(maker<HolderImpl>(), kSquare);
}

// --- sizes ---------------------------------------------------------------------------------------

struct EmptyImpl : torch::nn::Module {
  EmptyImpl()
      : nothing(register_parameter("nothing", at::empty({0, 5}))),
        linear(register_module("linear", torch::nn::Linear(5, 5))) {}
  at::Tensor forward(const at::Tensor& x) { return linear(x) + nothing.sum(); }
  at::Tensor nothing;
  torch::nn::Linear linear;
};

struct OnlyEmptyImpl : torch::nn::Module {
  OnlyEmptyImpl() : nothing(register_parameter("nothing", at::empty({0, 5}))) {}
  at::Tensor forward(const at::Tensor& x) { return x + nothing.sum(); }
  at::Tensor nothing;
};

struct EmptiesImpl : torch::nn::Module {
  EmptiesImpl()
      : first(register_module("first", Unit<EmptyImpl>())),
        second(register_module("second", Unit<OnlyEmptyImpl>())),
        third(register_module("third", Unit<EmptyImpl>())) {}
  at::Tensor forward(const at::Tensor& x) { return third(second(first(x))); }
  Unit<EmptyImpl> first;
  Unit<OnlyEmptyImpl> second;
  Unit<EmptyImpl> third;
};

TEST(UnitForms, WithParametersOfNoElementsTrainLikeAPlainModel) {
  expect_trains_like_plain(maker<EmptiesImpl>(), kSquare);
}

TEST(UnitForms, OnMoreRanksThanElementsTrainLikeAPlainModel) {
  struct TinyImpl : torch::nn::Module {
    TinyImpl()
        : first(register_module("first", Unit<Block>(1, 1))),
          second(register_module("second", Unit<Block>(1, 1))) {}
    at::Tensor forward(const at::Tensor& x) { return second(first(x)); }
    Unit<Block> first;
    Unit<Block> second;
  };
  const auto loss = [](auto& model, int rank, int step) {
    return model(input_for(rank, step, {3, 1})).square().mean();
  };
  const auto expected = testing::train_plain(build(maker<TinyImpl>()), 5, 3, loss);
  for (const Strategy& strategy : {Strategy::optim, Strategy::optim_grads_params}) {
    run_ranks(5, [&](World& world) {
      const Mesh mesh = world.mesh();
      auto model = build(maker<TinyImpl>());
      Sharded sharded = fully_shard(model, mesh, {.strategy = strategy});
      testing::train(model, sharded, world.rank(), 3, loss);
      testing::expect_close(testing::weights_of(sharded, model), expected, to_text(strategy));
    });
  }
}

TEST(UnitForms, OfAThousandUnitsTrainLikeAPlainModel) {
  const auto expected = testing::train_plain(build([] { return Chain(1000); }), 2, 2, kSquare);
  run_ranks(2, [&](World& world) {
    const Mesh mesh = world.mesh();
    Chain model = build([] { return Chain(1000); });
    Sharded sharded = fully_shard(model, mesh);
    testing::train(model, sharded, world.rank(), 2, kSquare);
    EXPECT_EQ(EngineAccess::of(sharded).slabs().num_misses(), 0);
    testing::expect_close(testing::weights_of(sharded, model), expected);
  });
}

}  // namespace
}  // namespace fsdp::unit_forms_test
