// The kind of pool may change addresses and bytes, but no numbers.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "fsdp/shard/engine/engine.h"
#include "support/run_ranks.h"
#include "support/trains_like_plain.h"

namespace fsdp::engine_pools_test {
namespace {

using testing::build;
using testing::input_for;
using testing::kSquare;
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

TEST(EnginePools, KeepAddressesFromTheFirstStepOn) {
  for (const PoolKind kind : {PoolKind::kDoubleBuffer, PoolKind::kMaxPool, PoolKind::kPlanned}) {
    testing::on_sharded(
        2, [] { return Uneven(); }, {.pool = kind, .other_units = OtherUnits::kPersistent},
        [&](Uneven& model, Sharded& sharded, int rank) {
          std::vector<const void*> addresses;
          for (Unit<Traced>& unit : model->units)
            unit->trace = [&](const void* address) { addresses.push_back(address); };
          std::vector<const void*> first;
          for (int step = 0; step < 4; ++step) {
            addresses.clear();
            kSquare(model, rank, step).backward();
            testing::descend(sharded);
            EXPECT_EQ(addresses.size(), 2 * model->units.size());
            if (step == 0) first = addresses;
            EXPECT_EQ(addresses, first) << name_of(kind) << " step " << step;
          }
          EXPECT_TRUE(EngineAccess::of(sharded).weights().pool()->addresses_are_fixed())
              << name_of(kind);
        });
  }
}

TEST(EnginePools, AreNotPinnedByWhatRanBeforeTheFirstStep) {
  testing::on_sharded(
      2, [] { return testing::Chain(4); }, {},
      [&](testing::Chain& model, Sharded& sharded, int rank) {
        {
          // For example, an initialisation that looks at the units one by one.
          const at::NoGradGuard no_grad;
          for (const size_t i : {2, 0, 3, 1, 1, 0})
            model->units[i](input_for(0, 0, {2, i == 0 ? 5 : 7}));
        }
        for (int step = 0; step < 3; ++step) {
          kSquare(model, rank, step).backward();
          testing::descend(sharded);
          EXPECT_TRUE(EngineAccess::of(sharded).weights().pool()->addresses_are_fixed())
              << "step " << step;
        }
        EXPECT_EQ(EngineAccess::of(sharded).weights().num_misses(), 0);
      });
}

TEST(EnginePools, GiveASlabBackWhenItsReductionHasEnded) {
  // When a unit's backward begins, only the one before it is still being reduced.
  testing::on_sharded(
      2, [] { return testing::Chain(10); }, {.pool = PoolKind::kOnDemand},
      [&](testing::Chain& model, Sharded& sharded, int rank) {
        int most = 0;
        at::Tensor x = input_for(rank, 0);
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
