// One unit as the engine sees it.
#pragma once

#include <c10/core/Stream.h>

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "fsdp/comm/operation.h"
#include "fsdp/shard/param_group.h"
#include "fsdp/shard/slab_source.h"

namespace fsdp {

// When a unit's weights are gathered.
enum class UnitKind : uint8_t {
  kScheduled,  // around each use, ahead of it as the schedule says, in memory of the pool
  kEnclosing,  // contains other units: when it is entered, in memory of its own
  kResident,   // parameters outside any unit: whole all the time, since nothing says when they are
               // used
};

// A group and the engine's bookkeeping about it.
struct GroupState {
  std::unique_ptr<ParamGroup> group;
  std::optional<SlabLease> weight_slab;    // none: the weights are whole in their own buffer
  std::optional<SlabLease> gradient_slab;  // none: gradients go straight to the main gradients

  bool is_reduced = false;  // its part of the running backward is on its way
};

struct UnitState {
  int32_t index = -1;  // in order of registration; also in the pool's table
  std::string name;
  UnitKind kind = UnitKind::kScheduled;
  std::vector<GroupState> groups;
  std::vector<UnitState*> needs;  // units that own parameters this one uses too (ties)
  // Outermost of enclosing units: its forward ends where its backward begins, so it stays whole.
  bool stays_for_backward = false;
  // What the user wants gathered when this one begins, by phase; nullopt: what the schedule says.
  std::array<std::optional<std::vector<UnitState*>>, 2> ahead;

  Tag gather_tag;
  Tag reduce_tag;
  std::string gather_range;  // for profilers: "fsdp::all_gather blocks.3"
  std::string reduce_range;

  // The one its calls compute on, which orders its slabs, gradients and collectives; only of
  // devices that have streams, and once there was a call.
  std::optional<c10::Stream> stream;
  Work update;               // of its weights, by the optimizer; is_updating until waited for
  bool is_updating = false;  // (Engine::begin_update)
  int32_t num_active = 0;    // uses that compute now, nested ones included
  int32_t stay_last = -1;    // the schedule keeps its weights until this time
  int32_t num_pending = 0;   // calls whose backward may still come (unit_call.h)
  bool is_repeated = false;  // the running backward is not the first one through its graph
};

}  // namespace fsdp
