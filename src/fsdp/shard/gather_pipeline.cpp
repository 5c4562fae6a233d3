#include "fsdp/shard/gather_pipeline.h"

#include <ATen/record_function.h>

namespace fsdp {

bool GatherPipeline::has_room(const UnitState& unit) const {
  for (const GroupState& state : unit.groups) {
    if (!state.group->needs_gather() || !state.weight_slab) continue;
    if (!slabs_.has_room(*state.weight_slab)) return false;
  }
  return true;
}

void GatherPipeline::start(UnitState& unit, SlabFrom from) {
  for (GroupState& state : unit.groups) {
    if (!state.group->needs_gather()) continue;
    RECORD_FUNCTION(unit.gather_range, {});
    void* slab = nullptr;
    if (state.weight_slab) {
      slabs_.acquire(*state.weight_slab, from);
      slab = state.weight_slab->address();
    }
    state.group->start_gather(slab, unit.gather_tag);
  }
}

void GatherPipeline::finish(UnitState& unit) {
  for (GroupState& state : unit.groups) state.group->finish_gather();
}

void GatherPipeline::release(UnitState& unit) {
  for (GroupState& state : unit.groups) {
    if (!state.weight_slab || !state.weight_slab->is_held()) continue;
    state.group->reshard();
    slabs_.release(*state.weight_slab);
  }
  unit.stay_last = -1;
}

void GatherPipeline::abandon(UnitState& unit) noexcept {
  for (GroupState& state : unit.groups) {
    state.group->abandon_gather();
    if (state.weight_slab) slabs_.forget(*state.weight_slab);
  }
  unit.stay_last = -1;
  unit.num_active = 0;
}

}  // namespace fsdp
