// One call of a unit's forward, and its way back through autograd; and all calls of a model.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "fsdp/shard/engine/gradients.h"
#include "fsdp/shard/engine/sharded_unit.h"
#include "fsdp/shard/engine/weights.h"
#include "fsdp/shard/unit.h"

namespace fsdp {

class UnitCall;

// The calls of all units whose backward may still come, and the backward that runs.
class UnitCalls {
 public:
  UnitCalls(const ShardedUnits& units, Weights& weights, Gradients& gradients)
      : units_(units), weights_(weights), gradients_(gradients) {}

  // After all units are added. `self` lives as long as the engine.
  void complete(std::weak_ptr<UnitCalls> self);

  Weights& weights() { return weights_; }
  Gradients& gradients() { return gradients_; }

  // --- calls ---
  // Before a forward: opens a pass where this call begins one.
  CallMode begin(ShardedUnit& unit);
  int64_t next_number() { return next_number_++; }
  // Counts a call whose backward may come, until it has come or cannot come any more. Returns a
  // count that uncount() takes; counts from before a reset() are ignored.
  int64_t count(ShardedUnit& unit);
  void uncount(ShardedUnit& unit, int64_t generation);
  int32_t num_pending(const ShardedUnit& unit) const {
    return states_[static_cast<size_t>(unit.index())].num_pending;
  }

  // --- the running backward ---
  // Called when a backward reaches one of our hooks. Throws an Error if it builds a graph itself.
  void enter_backward();
  bool is_in_backward() const { return in_backward_; }
  int64_t backward_number() const { return backward_number_; }
  // Begins the backward of one more call; a repeated one is not the first through its graph.
  void begin_backward_of(std::shared_ptr<UnitCall> call, ShardedUnit& unit, bool is_repeated);
  // Ends newer calls that have no hook of their own for it.
  void end_calls_after(int64_t number);
  // Ends the backward of one call; the end of the unit's last call starts its reduction.
  void finish(ShardedUnit& unit);
  // Autograd tells the end of the backward, except of one inside a recomputed part.
  void end_backward();

  // After an error: no call is pending, and no backward runs.
  void reset();

 private:
  // Calls of one unit.
  struct State {
    int32_t num_pending = 0;   // their backward may still come
    bool is_repeated = false;  // the running backward is not the first one through its graph
  };

  State& state_of(const ShardedUnit& unit) { return states_[static_cast<size_t>(unit.index())]; }
  void join_backward();
  void reduce_if_through(ShardedUnit& unit);
  void close_backward();

  const ShardedUnits& units_;
  Weights& weights_;
  Gradients& gradients_;
  std::weak_ptr<UnitCalls> self_;
  std::vector<State> states_;                    // by index of the unit
  std::vector<std::shared_ptr<UnitCall>> open_;  // of the running backward
  int64_t next_number_ = 0;
  int64_t generation_ = 0;
  bool in_backward_ = false;
  bool end_is_queued_ = false;
  int64_t backward_number_ = 0;
};

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
// A call counts as pending (UnitCalls::count) as long as a backward may reach it: until the first
// one has ended, or until the call is gone with its graph. The first forward of a recomputed
// function leaves no graph; its replay keeps the call, which gives its place to the second forward.
class UnitCall final : public UnitHooks::Call, public std::enable_shared_from_this<UnitCall> {
 public:
  UnitCall(std::shared_ptr<UnitCalls> calls, ShardedUnit& unit);
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
  void stop_pending(UnitCalls& calls);
  bool is_in_backward(const UnitCalls& calls) const {
    return backward_number_ == calls.backward_number();
  }

  // Hooks of a graph that outlives the model do nothing.
  const std::weak_ptr<UnitCalls> calls_;
  std::shared_ptr<UnitCalls> running_;  // from construction until the forward has ended
  ShardedUnit& unit_;                   // valid while the calls are
  const CallMode mode_;
  const int64_t number_;
  const bool has_gradients_;              // hooks are wanted
  const bool will_be_recomputed_;         // hooks will be wanted in the second forward
  std::optional<int64_t> pending_since_;  // the result of count(); nullopt: not pending
  bool is_forward_open_ = false;
  uint64_t first_node_ = 0;       // the sequence number of the first node of the forward itself
  Weights::Times times_;          // of the use that is open now
  int64_t backward_number_ = -1;  // the backward it takes part in
  bool is_through_ = false;       // of that backward
};

}  // namespace fsdp
