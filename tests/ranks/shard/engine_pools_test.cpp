// The kind of pool may change addresses and bytes, but no numbers.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/embedding.h>

#include <map>

#include "fsdp/shard/engine/engine.h"
#include "support/run_ranks.h"
#include "support/sharded_training.h"

namespace fsdp::engine_pools_test {
namespace {

using testing::build;
using testing::input_for;
using testing::run_ranks;

// Tells where its weight is, at every use.
struct TracedImpl : torch::nn::Module {
  TracedImpl(int64_t in, int64_t out)
      : linear(register_module("linear", torch::nn::Linear(in, out))) {}
  at::Tensor forward(const at::Tensor& x) {
    if (!trace) return at::tanh(linear(x));
    trace(linear->weight.const_data_ptr());
    const at::Tensor y = linear(x);
    if (y.requires_grad())
      y.register_hook([this](const at::Tensor&) { trace(linear->weight.const_data_ptr()); });
    return at::tanh(y);
  }
  torch::nn::Linear linear;
  std::function<void(const void*)> trace;
};
TORCH_MODULE(Traced);

struct UnevenImpl : torch::nn::Module {
  UnevenImpl() {
    const std::vector<int64_t> widths = {5, 7, 7, 7, 31, 2, 7, 3};
    for (size_t i = 0; i + 1 < widths.size(); ++i)
      units.push_back(
          register_module("unit" + std::to_string(i), Unit<Traced>(widths[i], widths[i + 1])));
  }
  at::Tensor forward(at::Tensor x) {
    for (Unit<Traced>& unit : units) x = unit(x);
    return x;
  }
  std::vector<Unit<Traced>> units;
};
TORCH_MODULE(Uneven);

const auto kSquare = [](auto& model, int rank, int step) {
  return model(input_for(rank, step)).square().mean();
};

TEST(EnginePools, GiveBitEqualResults) {
  const auto expected = testing::train_plain(build([] { return Uneven(); }), 2, 4, kSquare);
  for (const PoolKind kind : all_pool_kinds()) {
    for (const int prefetch : {0, 1, 3}) {
      run_ranks(2, [&](World& world) {
        const Mesh mesh = world.mesh();
        Uneven model = build([] { return Uneven(); });
        Sharded sharded = fully_shard(model, mesh, {.pool = kind, .prefetch = prefetch});
        testing::train(model, sharded, world.rank(), 4, kSquare);
        EXPECT_EQ(EngineAccess::of(sharded).slabs().num_misses(), 0) << name_of(kind);
        testing::expect_equal(testing::weights_of(sharded, model), expected,
                              std::string(name_of(kind)));
      });
    }
  }
}

TEST(EnginePools, KeepAddressesFromTheFirstStepOn) {
  for (const PoolKind kind : {PoolKind::kDoubleBuffer, PoolKind::kMaxPool, PoolKind::kPlanned}) {
    run_ranks(2, [&](World& world) {
      const Mesh mesh = world.mesh();
      Uneven model = build([] { return Uneven(); });
      Sharded sharded =
          fully_shard(model, mesh, {.pool = kind, .other_units = OtherUnits::kPersistent});
      std::vector<const void*> addresses;
      for (Unit<Traced>& unit : model->units)
        unit->trace = [&](const void* address) { addresses.push_back(address); };
      std::vector<const void*> first;
      for (int step = 0; step < 4; ++step) {
        addresses.clear();
        kSquare(model, world.rank(), step).backward();
        testing::descend(sharded);
        EXPECT_EQ(addresses.size(), 2 * model->units.size());
        if (step == 0) first = addresses;
        EXPECT_EQ(addresses, first) << name_of(kind) << " step " << step;
      }
      EXPECT_TRUE(EngineAccess::of(sharded).slabs().pool().addresses_are_fixed()) << name_of(kind);
    });
  }
}

TEST(EnginePools, AreNotPinnedByWhatRanBeforeTheFirstStep) {
  struct SquareImpl : torch::nn::Module {
    SquareImpl() {
      for (int i = 0; i < 4; ++i)
        units.push_back(register_module("unit" + std::to_string(i), Unit<Traced>(5, 5)));
    }
    at::Tensor forward(at::Tensor x) {
      for (Unit<Traced>& unit : units) x = unit(x);
      return x;
    }
    std::vector<Unit<Traced>> units;
  };
  using Square = torch::nn::ModuleHolder<SquareImpl>;
  run_ranks(2, [&](World& world) {
    const Mesh mesh = world.mesh();
    Square model(build([] { return std::make_shared<SquareImpl>(); }));
    Sharded sharded = fully_shard(model, mesh);
    {
      // For example, an initialisation that looks at the units one by one.
      const at::NoGradGuard no_grad;
      for (const size_t i : {2, 0, 3, 1, 1, 0}) model->units[i](input_for(0, 0));
    }
    for (int step = 0; step < 3; ++step) {
      kSquare(model, world.rank(), step).backward();
      testing::descend(sharded);
      EXPECT_TRUE(EngineAccess::of(sharded).slabs().pool().addresses_are_fixed())
          << "step " << step;
    }
    EXPECT_EQ(EngineAccess::of(sharded).slabs().num_misses(), 0);
  });
}

// --- a prediction layer that calls the embedding again -------------------------------------------

struct SharingLinearImpl : torch::nn::LinearImpl {
  using torch::nn::LinearImpl::LinearImpl;
  void share(const at::Tensor& other) { weight = parameters_["weight"] = other; }
};
TORCH_MODULE(SharingLinear);

struct TiedHeadImpl : torch::nn::Module {
  TiedHeadImpl()
      : projection(register_module("projection",
                                   SharingLinear(torch::nn::LinearOptions(4, 8).bias(false)))) {}
  at::Tensor forward(const at::Tensor& x) { return projection(x); }
  SharingLinear projection;
};

using Probe = std::function<void()>;

struct WatchedEmbeddingImpl : torch::nn::Module {
  WatchedEmbeddingImpl() : table(register_module("table", torch::nn::Embedding(8, 4))) {}
  at::Tensor forward(const at::Tensor& tokens) {
    if (probe) probe();
    return table(tokens);
  }
  torch::nn::Embedding table;
  Probe probe;
};
using Embedding = Unit<WatchedEmbeddingImpl>;

// Predicts one token further from the hidden state and the embedding of the next token, which the
// layer computes itself.
struct PredictionImpl : torch::nn::Module {
  explicit PredictionImpl(Embedding shared)
      : embedding(std::move(shared)), mix(register_module("mix", torch::nn::Linear(8, 4))) {}
  at::Tensor forward(const at::Tensor& hidden, const at::Tensor& next) {
    const at::Tensor known = embedding(next);
    if (probe) probe();
    const at::Tensor mixed = mix(at::cat({hidden, known}, -1));
    if (probe && mixed.requires_grad()) mixed.register_hook([this](const at::Tensor&) { probe(); });
    return at::tanh(mixed);
  }
  Embedding embedding;  // called, not owned: the model registers it
  torch::nn::Linear mix;
  Probe probe;
};

struct MultiTokenImpl : torch::nn::Module {
  MultiTokenImpl() : embedding(register_module("embedding", Embedding())) {
    for (int i = 0; i < 3; ++i)
      blocks.push_back(register_module("block" + std::to_string(i), Unit<testing::Block>(4, 4)));
    prediction = register_module("prediction", Unit<PredictionImpl>(embedding));
    head = register_module("head", Unit<TiedHeadImpl>());
    head->projection->share(embedding->table->weight);
  }
  at::Tensor forward(const at::Tensor& tokens) {
    at::Tensor x = embedding(tokens);
    for (Unit<testing::Block>& block : blocks) x = block(x);
    return at::cat({head(x), head(prediction(x, tokens.roll(1)))}, 0);
  }
  Embedding embedding;
  std::vector<Unit<testing::Block>> blocks;
  Unit<PredictionImpl> prediction = nullptr;
  Unit<TiedHeadImpl> head = nullptr;
};
TORCH_MODULE(MultiToken);

at::Tensor token_loss(MultiToken& model, int rank, int step) {
  return model((at::arange(6, at::kLong) * (rank + 2) + step).remainder(8)).square().mean();
}

int num_whole_units(const Sharded& sharded) {
  int count = 0;
  for (const auto& unit : EngineAccess::of(sharded).units())
    count += std::any_of(unit->groups().begin(), unit->groups().end(), [](const ParamGroup& group) {
      return group.slabs().weight && group.slabs().weight->is_held();
    });
  return count;
}

TEST(EnginePools, TwoSlotsDoForAPredictionLayerThatCallsTheTiedEmbeddingAgain) {
  const auto expected = testing::train_plain(build([] { return MultiToken(); }), 2, 4, token_loss);
  for (const PoolKind kind : all_pool_kinds()) {
    run_ranks(2, [&](World& world) {
      const Mesh mesh = world.mesh();
      MultiToken model = build([] { return MultiToken(); });
      Sharded sharded = fully_shard(model, mesh, {.pool = kind, .prefetch = 1});
      int most = 0;
      int num_probes = 0;
      const auto probe = [&] {
        most = std::max(most, num_whole_units(sharded));
        ++num_probes;
      };
      model->embedding->probe = probe;
      model->prediction->probe = probe;
      for (Unit<testing::Block>& block : model->blocks)
        block->inside = [&](testing::BlockImpl&) { probe(); };
      int64_t misses = 0;
      for (int step = 0; step < 4; ++step) {
        most = 0;
        token_loss(model, world.rank(), step).backward();
        testing::descend(sharded);
        EXPECT_LE(most, 2) << name_of(kind) << " step " << step;
        if (step == 0) misses = EngineAccess::of(sharded).slabs().num_misses();
      }
      EXPECT_GE(num_probes, 4 * 7);
      EXPECT_EQ(EngineAccess::of(sharded).slabs().num_misses(), misses)
          << name_of(kind) << ": the order is known from the second step on";
      testing::expect_close(testing::weights_of(sharded, model), expected,
                            std::string(name_of(kind)));
    });
  }
}

TEST(EnginePools, ThatRefuseMovesRunThePredictionLayer) {
  run_ranks(2, [&](World& world) {
    const Mesh mesh = world.mesh();
    MultiToken model = build([] { return MultiToken(); });
    Sharded sharded = fully_shard(model, mesh, {.on_move = OnMove::kRefuse});
    for (int step = 0; step < 4; ++step) {
      token_loss(model, world.rank(), step).backward();
      testing::descend(sharded);
    }
    EXPECT_TRUE(EngineAccess::of(sharded).slabs().pool().addresses_are_fixed());
  });
}

TEST(EnginePools, GiveASlabBackWhenItsReductionHasEnded) {
  // When a unit's backward begins, only the one before it is still being reduced.
  run_ranks(2, [&](World& world) {
    const Mesh mesh = world.mesh();
    testing::Chain model = build([] { return testing::Chain(10); });
    Sharded sharded = fully_shard(model, mesh, {.pool = PoolKind::kOnDemand});
    int most = 0;
    at::Tensor x = input_for(world.rank(), 0);
    for (Unit<testing::Block>& unit : model->units) {
      x = unit(x);
      x.register_hook([&](const at::Tensor&) {
        int live = 0;
        for (const auto& each : EngineAccess::of(sharded).units())
          live += each->groups()[0].slabs().gradient->is_held() ? 1 : 0;
        most = std::max(most, live);
      });
    }
    x.sum().backward();
    EXPECT_EQ(most, 1);
  });
}

}  // namespace
}  // namespace fsdp::engine_pools_test
