// Takes gradients from autograd, and reduces them while other units compute.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <deque>
#include <string>
#include <vector>

#include "fsdp/shard/slab_source.h"
#include "fsdp/shard/unit_state.h"

namespace fsdp {

struct ReduceSetting {
  int32_t gradient_slots = 2;  // units whose unreduced gradients may be in memory at once
  ReportNan report_nan = ReportNan::kOff;
  int rank = 0;
  at::Tensor nonfinite;  // one element, set by reductions that store a NaN or Inf
  WireSlots& wire_slots;
};

// A unit's gradients live in a slab from their first write until their reduction has ended, and the
// reduction of one unit ends at the latest when the next unit's backward does: what a pool plans
// with, and the same in every step. A reduction at the end of a cycle (docs/engine.md) follows the
// last backward's and has until somebody wants the gradients.
class ReducePipeline {
 public:
  ReducePipeline(SlabSource& slabs, ReduceSetting setting);

  // Of the running backward: whether it is the cycle's last, and its number for messages.
  void begin_backward(bool is_last, int64_t microbatch);

  // Memory for the unit's gradients, if they need a slab and have none.
  void prepare(UnitState& unit);

  // Autograd has the gradient of a member (undefined: it was written to its target directly).
  void accept(UnitState& unit, GroupState& state, int64_t member, const at::Tensor& gradient);

  // All of the group's gradients of this backward are there, those of unused members excepted.
  void reduce(UnitState& unit, GroupState& state);

  // The backward of `unit` has ended: so must the reductions of the units before it.
  void retire_all_but(const UnitState& unit);
  void finish();
  void abandon(UnitState& unit) noexcept;

 private:
  struct InFlight {
    UnitState* unit;
    GroupState* state;
  };

  void retire_front();
  void start_cycle_end(UnitState& unit, GroupState& state);
  void finish_cycle();
  void check_finite(const GroupState& state, int64_t member, const at::Tensor& gradient) const;
  int32_t num_units_with_slabs(const UnitState& but) const;
  bool is_in_flight(const GroupState& state) const;

  SlabSource& slabs_;
  const ReduceSetting setting_;
  std::deque<InFlight> in_flight_;     // of this backward, oldest first
  std::deque<InFlight> at_cycle_end_;  // of what comes after the last backward
  bool is_last_ = true;
  int64_t microbatch_ = 0;
};

}  // namespace fsdp
