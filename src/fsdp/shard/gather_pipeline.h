// Gathers units ahead of their use and lets them go after it.
#pragma once

#include <cstdint>

#include "fsdp/shard/slab_source.h"
#include "fsdp/shard/unit_state.h"

namespace fsdp {

// Everything happens in the background: start() returns at once, finish() makes the computing
// stream (on a CPU: the caller) wait. A gather waits, on its own stream, for what the caller's
// stream had queued before; so memory that was released by then is free for it.
class GatherPipeline {
 public:
  explicit GatherPipeline(SlabSource& slabs) : slabs_(slabs) {}

  // Whether start() could have all its memory from the pool.
  bool has_room(const UnitState& unit) const;

  // No effect on a unit that is gathered or being gathered.
  void start(UnitState& unit, SlabFrom from);
  void finish(UnitState& unit);
  // Waits for a gather that nobody used.
  void release(UnitState& unit);
  void abandon(UnitState& unit) noexcept;

 private:
  SlabSource& slabs_;
};

}  // namespace fsdp
