// One unit of a sharded model: its groups, and where its weights are.
#pragma once

#include <c10/core/Stream.h>

#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "fsdp/comm/operation.h"
#include "fsdp/shard/group/param_group.h"
#include "fsdp/shard/unit.h"

namespace fsdp {

class UnitCalls;

// When a unit's weights are gathered.
enum class UnitKind : uint8_t {
  kScheduled,  // around each use, ahead of it as the schedule says, in memory of the pool
  kEnclosing,  // contains other units: when it is entered, in memory of its own
  kResident,   // parameters outside any unit: whole all the time, since nothing says when they are
               // used
};

// Where a unit's weights are. Units whose weights need no slab rest in kWhole.
//
//   kResting --start_gather()--> kGathering --wait_gather()--> kWhole --release_weights()-->
//   kResting
//
// An update, or newer weights of other ranks, also lead from kWhole to kResting: weights must not
// be read while they are written, and the next gather binds the parameters again.
enum class WeightPhase : uint8_t { kResting, kGathering, kWhole };

// Everything happens in the background: start_gather() returns at once, wait_gather() makes the
// computing stream (on a CPU: the caller) wait. A gather waits, on its own stream, for everything
// that the caller's stream had queued before; so it may use memory that was released by then.
class ShardedUnit final : public UnitHooks {
 public:
  // Its calls are among these.
  ShardedUnit(int32_t index, std::string name, UnitKind kind, std::weak_ptr<UnitCalls> calls);
  ~ShardedUnit() override;
  ShardedUnit(const ShardedUnit&) = delete;
  ShardedUnit& operator=(const ShardedUnit&) = delete;

  // --- construction (fully_shard.cpp) ---
  ParamGroup& add_group(std::vector<GroupMember> members, Trainable trainable,
                        const GroupSetting& setting, FlatLayoutRequest request);
  // call_unit(module) calls this unit as long as it lives.
  void answer_for(const torch::nn::Module& module);
  void connect(std::vector<ShardedUnit*> needs, bool stays_for_backward) {
    needs_ = std::move(needs);
    stays_for_backward_ = stays_for_backward;
  }

  std::shared_ptr<Call> begin_call() override;  // unit_call.cpp

  // --- what it is ---
  int32_t index() const { return index_; }  // in order of registration; also in the pool's table
  const std::string& name() const { return name_; }
  UnitKind kind() const { return kind_; }
  std::deque<ParamGroup>& groups() { return groups_; }
  const std::deque<ParamGroup>& groups() const { return groups_; }
  bool is_trainable() const;
  // Units that own parameters this unit uses, too (ties).
  const std::vector<ShardedUnit*>& needs() const { return needs_; }
  // For the outermost of enclosing units: its backward follows its forward directly.
  bool stays_for_backward() const { return stays_for_backward_; }
  const Tag& reduce_tag() const { return reduce_tag_; }
  // For profilers: "fsdp::reduce blocks.3".
  const std::string& reduce_range() const { return reduce_range_; }

  // The stream of the unit's calls, which orders its slabs, gradients and collectives; only for
  // devices with streams, and after the first call.
  const std::optional<c10::Stream>& stream() const { return stream_; }
  void compute_on(c10::Stream stream) { stream_ = stream; }

  // --- weights ---
  WeightPhase phase() const { return phase_; }
  // Whether the pool has room for all memory of start_gather().
  bool has_room() const;
  // Begins in kResting; no effect in other phases.
  void start_gather(SlabFrom from);
  void wait_gather();
  // Waits for a gather that nobody used.
  void release_weights();
  void cancel_weights() noexcept;
  // Other ranks have newer weights, of trainable groups or of all: the next gather brings them.
  enum class Which : uint8_t { kTrainable, kAll };
  void expect_newer_weights(Which which);

  // --- an optimizer's update, which reads gradients and writes weights and main weights ---
  // Makes the next gather wait for `update`.
  void begin_update(Work update);
  // Makes the caller wait for it, and releases the memory of gradients that were zeroed meanwhile.
  void wait_update();
  bool is_updating() const { return is_updating_; }

 private:
  void move(WeightPhase from, WeightPhase to);
  void unbind();
  // Whether any group has: groups of one strategy may differ in this, because a grid of one rank
  // cuts nothing. They are bound and unbound together.
  bool has_slabs() const;

  const int32_t index_;
  const std::string name_;
  const UnitKind kind_;
  const std::weak_ptr<UnitCalls> calls_;
  const torch::nn::Module* named_module_ = nullptr;  // that it answers for
  const Tag gather_tag_;
  const Tag reduce_tag_;
  const std::string gather_range_;
  const std::string reduce_range_;
  std::deque<ParamGroup> groups_;
  std::vector<ShardedUnit*> needs_;
  bool stays_for_backward_ = false;
  std::optional<c10::Stream> stream_;
  WeightPhase phase_ = WeightPhase::kResting;
  Work update_;
  bool is_updating_ = false;  // until somebody has waited for update_
};

using ShardedUnits = std::vector<std::unique_ptr<ShardedUnit>>;

void wait_updates(const ShardedUnits& units);
// After an error: waits, and ignores those that failed.
void cancel_updates(const ShardedUnits& units) noexcept;

}  // namespace fsdp
