// fsdp::recompute() inside and around units: same numbers, one reduction, no guesses.
#include "fsdp/shard/recompute.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/dropout.h>

#include <map>

#include "fsdp/shard/engine/engine.h"
#include "support/run_ranks.h"
#include "support/trains_like_plain.h"

namespace fsdp::recompute_test {
namespace {

using testing::build;
using testing::input_for;
using testing::kSquare;
using testing::run_ranks;

// Where recompute() is applied.
enum class Around : uint8_t { kNothing, kInside, kOneUnit, kSeveralUnits, kNested, kEverything };

struct InnerImpl : torch::nn::Module {
  explicit InnerImpl(Around where)
      : first(register_module("first", torch::nn::Linear(5, 9))),
        second(register_module("second", torch::nn::Linear(9, 5))),
        around(where) {}
  at::Tensor forward(const at::Tensor& x) {
    if (inside) inside();
    const auto body = [this](const at::Tensor& input) {
      return second(at::dropout(at::tanh(first(input)), drop, true));
    };
    return x + (around == Around::kInside ? recompute(body, x) : body(x));
  }
  torch::nn::Linear first;
  torch::nn::Linear second;
  Around around;
  double drop = 0.0;
  std::function<void()> inside;
};

struct NetImpl : torch::nn::Module {
  explicit NetImpl(Around where) : around(where) {
    for (int i = 0; i < 4; ++i)
      units.push_back(register_module("unit" + std::to_string(i), Unit<InnerImpl>(where)));
  }
  at::Tensor forward(const at::Tensor& x) {
    const auto one = [this](size_t i) {
      return [this, i](const at::Tensor& y) { return units[i](y); };
    };
    const auto two = [this](size_t i) {
      return [this, i](const at::Tensor& y) { return units[i + 1](units[i](y)); };
    };
    const auto all = [this](const at::Tensor& y) {
      return units[3](units[2](units[1](units[0](y))));
    };
    switch (around) {
      case Around::kNothing:
      case Around::kInside:
        return all(x);
      case Around::kOneUnit:
        return units[3](recompute(one(2), recompute(one(1), units[0](x))));
      case Around::kSeveralUnits:
        return recompute(two(2), recompute(two(0), x));
      case Around::kNested:
        return recompute(
            [=](const at::Tensor& y) { return recompute(two(2), recompute(one(1), one(0)(y))); },
            x);
      case Around::kEverything:
        return recompute(all, x);
    }
    return x;
  }
  std::vector<Unit<InnerImpl>> units;
  Around around;
};
TORCH_MODULE(Net);

const std::vector<Around> kPlaces = {Around::kInside, Around::kOneUnit, Around::kSeveralUnits,
                                     Around::kNested, Around::kEverything};

TEST(Recompute, ChangesNoBitWhereverItIs) {
  for (const PoolKind kind : all_pool_kinds()) {
    const bool is_planned = kind == PoolKind::kPlanned || kind == PoolKind::kOnDemand;
    const Strategy& strategy = is_planned ? Strategy::optim_grads_params : Strategy::optim;
    const auto weights = [&](Around around, World& world) {
      const Mesh mesh = world.mesh();
      Net model = build([&] { return Net(around); });
      Sharded sharded = fully_shard(model, mesh, {.strategy = strategy, .pool = kind});
      testing::train(model, sharded, world.rank(), 3, kSquare);
      return testing::weights_of(sharded, model);
    };
    run_ranks(2, [&](World& world) {
      const auto without = weights(Around::kNothing, world);
      for (const Around around : kPlaces)
        testing::expect_equal(weights(around, world), without,
                              std::to_string(static_cast<int>(around)));
    });
  }
}

TEST(Recompute, DrawsTheSameDropoutMasks) {
  // One rank: the ranks of one process would share the generator.
  run_ranks(1, [](World& world) {
    const Mesh mesh = world.mesh();
    const auto weights = [&](Around around) {
      Net model = build([&] { return Net(around); });
      for (Unit<InnerImpl>& unit : model->units) unit->drop = 0.5;
      Sharded sharded = fully_shard(model, mesh);
      torch::manual_seed(3);
      testing::train(model, sharded, 0, 3, kSquare);
      return testing::weights_of(sharded, model);
    };
    const auto without = weights(Around::kNothing);
    for (const Around around : kPlaces)
      testing::expect_equal(weights(around), without, std::to_string(static_cast<int>(around)));
  });
}

struct Traffic {
  std::map<std::string, int> gathers;
  std::map<std::string, int> reductions;
};

Traffic third_step(Around around, PoolKind kind) {
  auto recording = std::make_shared<Recording>();
  World world = World::simulated(0, 2, recording);
  const Mesh mesh = world.mesh();
  Net model = build([&] { return Net(around); });
  Sharded sharded = fully_shard(model, mesh, {.pool = kind});
  for (int step = 0; step < 3; ++step) {
    recording->clear();
    kSquare(model, 0, step).backward();
    testing::descend(sharded);
  }
  EXPECT_EQ(EngineAccess::of(sharded).weights().num_misses(), 0) << static_cast<int>(around);
  Traffic traffic;
  for (const RecordedCall& call : *recording) {
    const std::string tag(call.print.tag.text());
    auto& counts = call.print.kind == OpKind::kAllGather ? traffic.gathers : traffic.reductions;
    ++counts[tag.substr(0, tag.find(' '))];
  }
  return traffic;
}

TEST(Recompute, ReducesEveryUnitOnce) {
  const std::map<std::string, int> once = {{"unit0", 1}, {"unit1", 1}, {"unit2", 1}, {"unit3", 1}};
  for (const Around around : kPlaces)
    EXPECT_EQ(third_step(around, PoolKind::kOnDemand).reductions, once) << static_cast<int>(around);
}

TEST(Recompute, GathersNothingOnAGuess) {
  // Recomputing runs forwards inside the backward; gathering the next forward unit there would be
  // useless. A unit is gathered for its forward, and once for its second forward and backward,
  // unless others are recomputed in between; the last units of the forward stay.
  using Counts = std::map<std::string, int>;
  EXPECT_EQ(third_step(Around::kOneUnit, PoolKind::kOnDemand).gathers,
            (Counts{{"unit0", 2}, {"unit1", 2}, {"unit2", 2}, {"unit3", 1}}));
  EXPECT_EQ(third_step(Around::kSeveralUnits, PoolKind::kOnDemand).gathers,
            (Counts{{"unit0", 3}, {"unit1", 2}, {"unit2", 2}, {"unit3", 1}}));
}

TEST(Recompute, GathersNothingAheadInItsSecondForward) {
  auto recording = std::make_shared<Recording>();
  World world = World::simulated(0, 2, recording);
  const Mesh mesh = world.mesh();
  Net model = build([] { return Net(Around::kSeveralUnits); });
  Sharded sharded = fully_shard(model, mesh, {.pool = PoolKind::kOnDemand});
  std::vector<std::string> gathered_last;  // whenever unit0 computes: in forward, and once more
  model->units[0]->inside = [&] {
    for (size_t i = recording->size(); i-- > 0;) {
      if ((*recording)[i].print.kind != OpKind::kAllGather) continue;
      return gathered_last.emplace_back((*recording)[i].print.tag.text()), void();
    }
  };
  for (int step = 0; step < 3; ++step) {
    gathered_last.clear();
    kSquare(model, 0, step).backward();
    testing::descend(sharded);
  }
  EXPECT_EQ(gathered_last, (std::vector<std::string>{"unit1 weight", "unit0 weight"}));
}

TEST(Recompute, OfAUnitUsedTwiceReducesItOnce) {
  struct TwiceImpl : torch::nn::Module {
    at::Tensor forward(const at::Tensor& x) {
      const auto use = [this](const at::Tensor& y) { return shared(y); };
      return recompute(use, recompute(use, before(x)));
    }
    Unit<testing::Block> before = register_module("before", Unit<testing::Block>(5, 5));
    Unit<testing::Block> shared = register_module("shared", Unit<testing::Block>(5, 5));
  };
  const auto make = [] { return torch::nn::ModuleHolder<TwiceImpl>(); };
  testing::expect_trains_like_plain(make, kSquare);
  auto recording = std::make_shared<Recording>();
  World world = World::simulated(0, 2, recording);
  const Mesh mesh = world.mesh();
  auto model = build(make);
  Sharded sharded = fully_shard(model, mesh);
  kSquare(model, 0, 0).backward();
  sharded.wait_gradients();
  int num_reductions = 0;
  for (const RecordedCall& call : *recording)
    num_reductions += call.print.kind == OpKind::kReduceScatter ? 1 : 0;
  EXPECT_EQ(num_reductions, 2) << "one per unit";
}

TEST(Recompute, WithoutGradientsIsAPlainCall) {
  testing::on_sharded(
      2, [] { return Net(Around::kNested); }, {},
      [](Net& model, Sharded& sharded, int) {
        const at::NoGradGuard no_grad;
        EXPECT_FALSE(model(input_for(0, 0)).requires_grad());
        for (const auto& unit : EngineAccess::of(sharded).units())
          EXPECT_EQ(EngineAccess::of(sharded).calls().num_pending(*unit), 0);
      });
}

}  // namespace
}  // namespace fsdp::recompute_test
