// One claim for many models: sharded training equals plain training.
#pragma once

#include <memory>
#include <string>

#include "fsdp/shard/engine/engine.h"
#include "support/run_ranks.h"
#include "support/sharded_training.h"

namespace fsdp::testing {

inline constexpr auto kSquare = [](auto& model, int rank, int step) {
  return model(input_for(rank, step)).square().mean();
};

inline bool nothing_is_held(const Sharded& sharded) {
  for (const auto& unit : EngineAccess::of(sharded).units())
    for (const ParamGroup& group : unit->groups())
      if ((group.slabs().weight && group.slabs().weight->is_held()) ||
          (group.slabs().gradient && group.slabs().gradient->is_held()))
        return false;
  return true;
}

// Trains sharded with every kind of pool; the two strategies that differ most take turns.
template <typename Make, typename Loss>
void expect_trains_like_plain(const Make& make, const Loss& loss, int steps = 3,
                              const std::vector<std::string>& units = {}) {
  const auto expected = train_plain(build(make), 2, steps, loss);
  const Strategy strategies[] = {Strategy::optim_grads_params, Strategy::optim};
  size_t turn = 0;
  for (const PoolKind kind : all_pool_kinds()) {
    const Strategy& strategy = strategies[turn++ % 2];
    run_ranks(2, [&](World& world) {
      const Mesh mesh = world.mesh();
      auto model = build(make);
      Sharded sharded =
          fully_shard(model, mesh, {.strategy = strategy, .units = units, .pool = kind});
      train(model, sharded, world.rank(), steps, loss);
      EXPECT_TRUE(nothing_is_held(sharded));
      expect_close(weights_of(sharded, model), expected, std::string(name_of(kind)));
    });
  }
}

template <typename Impl>
auto maker() {
  return [] { return torch::nn::ModuleHolder<Impl>(std::make_shared<Impl>()); };
}

}  // namespace fsdp::testing
