// Which units are whole, and when: gathers before their use, releases after it.
#pragma once

#include <c10/core/Device.h>
#include <c10/util/SmallVector.h>

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "fsdp/shard/engine/engine_memory.h"
#include "fsdp/shard/engine/schedule.h"
#include "fsdp/shard/engine/sharded_unit.h"
#include "fsdp/shard/options.h"

namespace fsdp {

// The context of a unit's call.
enum class CallMode : uint8_t {
  kTraining,   // with gradients, or the first forward of a recomputed function
  kRecompute,  // the second forward, inside a backward
  kInference,  // without gradients
  kInBetween,  // without gradients, while a training pass is under way
};

class Weights {
 public:
  // The pool is planned here, in memory of `pool_memory`; `registered` may be nullptr.
  Weights(const ShardOptions& options, c10::Device device, const ShardedUnits& units,
          SlabAllocator& pool_memory, UserBufferMemory* registered);

  // After all units are added: plans the pool for the order of registration.
  void complete();

  // The temporary memory of scheduled units; nullptr where they need none.
  BucketPool* pool() const { return pool_.get(); }
  // How often it had no room for a bucket that it knows.
  int64_t num_misses() const { return slabs_.num_misses; }

  // The order in which units are now expected to begin.
  const StepOrder& order() const { return schedule_->order(); }
  // Replaces the schedule's gathers when `unit` begins.
  void set_ahead(const ShardedUnit& unit, Phase phase, std::vector<ShardedUnit*> ahead);

  // --- passes ---
  // The kind of pass that a forward of this unit begins; kNone: it belongs to the open one.
  Schedule::Kind pass_begun_by(const ShardedUnit& unit, bool trains) const;
  bool is_training() const { return schedule_->kind() == Schedule::Kind::kTraining; }
  // Wait for gradients before, because their slabs may move. `num_backwards`: those so far.
  void open_pass(Schedule::Kind kind, int64_t num_backwards);
  void close_pass();

  // Whether the next pass runs in the current memory: no order was learned since it was planned.
  bool is_planned() const { return !new_order_; }
  // A new number means other memory or wire types for a step.
  int64_t plan_number() const { return plan_number_; }
  // After a change of the gradients' wire type: keeps pools of fixed memory, plans others again.
  void change_wire();

  // --- uses ---
  // A use of the unit, and of those that own parameters it shares; end_use() takes the result of
  // begin_use().
  using Times = c10::SmallVector<int32_t, 4>;
  Times begin_use(ShardedUnit& unit, Phase phase, CallMode mode);
  void end_use(ShardedUnit& unit, const Times& times, Phase phase, CallMode mode);

  // Keeps a unit whole from now on, whatever runs meanwhile, until as many calls of unpin(). All
  // ranks call it for the same units; gathers wait for wait_gather().
  // `writes`: the parameters may be changed meanwhile.
  void pin(ShardedUnit& unit, bool writes);
  void unpin(ShardedUnit& unit, bool writes);
  bool is_pinned(const ShardedUnit& unit) const {
    return uses_[static_cast<size_t>(unit.index())].num_pins > 0;
  }
  bool has_pins() const { return num_pins_ > 0; }

  // UsageError that names a parameter of the unit that somebody changed whose changes are lost.
  void check_parameters(const ShardedUnit& unit) const;

  // Releases every unit that is not in use; and one of them.
  void release();
  void release(ShardedUnit& unit);
  // After a backward: marks every unit as unused, also those whose calls did not say so.
  void end_uses();
  // Gathers the units that stay whole: parameters outside any unit.
  void gather_residents();
  // After an error: ends all gathers, releases all slabs, closes the pass.
  void cancel() noexcept;

 private:
  // The current use of a unit.
  struct Use {
    int32_t num_active = 0;  // uses that compute, nested ones included
    int32_t num_pins = 0;
    int32_t num_writers = 0;  // among them
    int32_t stay_last = -1;   // the schedule keeps its weights until this time
    // The user's gathers for its beginning, by phase; nullopt: those of the schedule.
    std::array<std::optional<std::vector<ShardedUnit*>>, 2> ahead;
  };

  Use& use_of(const ShardedUnit& unit) { return uses_[static_cast<size_t>(unit.index())]; }
  void make_pool(StepOrder order);
  void lease_buckets(ShardedUnit& unit);
  int32_t begin_one(ShardedUnit& unit, Phase phase, CallMode mode);
  void end_one(ShardedUnit& unit, int32_t time, Phase phase, CallMode mode);
  void gather_ahead(ShardedUnit& unit, Phase phase, CallMode mode);
  void start_ahead(ShardedUnit& unit, int32_t last);
  void release_one(ShardedUnit& unit);

  const ShardOptions& options_;
  const c10::Device device_;
  const ShardedUnits& units_;
  SlabAllocator& pool_memory_;
  SlabMemory slabs_;
  std::unique_ptr<BucketPool> pool_;
  UserBufferMemory* const registered_;
  std::vector<std::string> names_;  // of units, by index
  std::vector<Use> uses_;           // by index of the unit
  std::optional<Schedule> schedule_;
  std::vector<GatherPlan::Gather>
      deferred_gathers_;                // gathers that wait until a recompute has ended
  int32_t num_pins_ = 0;                // of all units
  int32_t num_active_ = 0;              // uses of scheduled units that compute now
  std::optional<StepOrder> new_order_;  // to plan with before the next pass
  int64_t plan_number_ = 0;
};

}  // namespace fsdp
