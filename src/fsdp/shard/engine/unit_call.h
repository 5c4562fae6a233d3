// One call of a unit's forward, and its way back through autograd.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <span>

#include "fsdp/shard/engine/engine.h"
#include "fsdp/shard/unit.h"

namespace fsdp {

// Note [Where a unit's backward begins and ends]
// It begins when a gradient arrives at any of the call's outputs. A hook sits on the node that made
// each output, so that it stays if the caller changes the output in place. The backward ends when
// everything inside is done. Autograd runs nodes in the reverse order of their creation, so a node
// that was created at the very beginning of the call runs after all others of the call: each input
// that needs a gradient is replaced by a view of itself, with a hook on the view. (A view and not
// an identity function of our own, so that a forward may still change its input in place, and
// autograd sees it.)
//
// A call whose inputs need no gradients (token ids) has no such node, and one that changes its
// input in place loses it. Such a call ends when autograd reaches an older call, or at the end of
// the backward.
//
// A call counts as pending (Engine::count_call) as long as a backward may reach it: until the first
// one has ended, or until the call is gone with its graph. The first forward of a recomputed
// function leaves no graph; its replay keeps the call, which gives its place to the second forward.
class UnitCall final : public UnitHooks::Call, public std::enable_shared_from_this<UnitCall> {
 public:
  UnitCall(std::shared_ptr<Engine> engine, ShardedUnit& unit);
  ~UnitCall() override;
  UnitCall(const UnitCall&) = delete;
  UnitCall& operator=(const UnitCall&) = delete;

  void enter(std::span<at::Tensor* const> inputs) override;
  void leave(std::span<at::Tensor* const> outputs) override;
  void fail() noexcept override;

  // Calls are numbered in the order of their forwards.
  int64_t number() const { return number_; }
  void begin_backward();
  void end_backward();

 private:
  void stop_pending(Engine& engine);
  bool is_in_backward(const Engine& engine) const {
    return backward_number_ == engine.backward_number();
  }

  // Hooks of a graph that outlives the model do nothing.
  const std::weak_ptr<Engine> engine_;
  std::shared_ptr<Engine> running_;  // from construction until the forward has ended
  ShardedUnit& unit_;                // valid while the engine is
  const CallMode mode_;
  const int64_t number_;
  const bool has_gradients_;              // hooks are wanted
  const bool will_be_recomputed_;         // hooks will be wanted in the second forward
  std::optional<int64_t> pending_since_;  // the result of count_call(); nullopt: not pending
  bool is_forward_open_ = false;
  uint64_t first_node_ = 0;       // the sequence number of the first node of the forward itself
  Weights::Times times_;          // of the use that is open now
  int64_t backward_number_ = -1;  // the backward it takes part in
  bool is_through_ = false;       // of that backward
};

// Attached to a unit by fully_shard().
class EngineHooks final : public UnitHooks {
 public:
  EngineHooks(std::shared_ptr<Engine> engine, ShardedUnit& unit)
      : engine_(std::move(engine)), unit_(unit) {}
  std::shared_ptr<Call> begin_call() override { return std::make_shared<UnitCall>(engine_, unit_); }

 private:
  const std::shared_ptr<Engine> engine_;
  ShardedUnit& unit_;
};

// The same for a module that ShardOptions::units names, while the hooks live.
std::unique_ptr<UnitHooks> make_named_unit_hooks(const torch::nn::Module& module,
                                                 std::weak_ptr<Engine> engine, ShardedUnit& unit);

}  // namespace fsdp
