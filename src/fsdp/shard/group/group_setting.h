// The setting that all parameter groups of one sharded model share.
#pragma once

#include <c10/core/Device.h>

#include <cstdint>
#include <vector>

#include "fsdp/comm/mesh.h"
#include "fsdp/comm/operation.h"
#include "fsdp/layout/strategy.h"
#include "fsdp/memory/slab_allocator.h"
#include "fsdp/shard/options.h"

namespace fsdp {

// The allocator of each kind of buffer.
struct GroupMemory {
  SlabAllocator& weight;
  SlabAllocator& main_weight;
  SlabAllocator& main_grad;
  SlabAllocator& host;  // offloaded main weights
};

// A cast to the wire type needs memory until its reduction has ended. Groups take turns in slots
// that fit any of them, one slot per stage of such a reduction: each stage's communicator is busy
// with one. A cast waits for the slot's last reduction on the communicator, so the computing stream
// never waits for either.
class WireSlots {
 public:
  struct Slot {
    Slab memory;
    Work last_use;
  };

  explicit WireSlots(SlabAllocator& allocator) : allocator_(allocator) {}

  // Nothing may be under way.
  void reserve(int64_t bytes, size_t num_slots) {
    slots_.clear();
    next_ = 0;
    if (bytes == 0) return;
    for (size_t i = 0; i < num_slots; ++i)
      slots_.push_back({Slab(allocator_, bytes, kAlignment), {}});
  }

  Slot& next() { return slots_[next_++ % slots_.size()]; }

  // After all reductions have ended: the next cycle begins with the first slot and does not wait.
  void end_cycle() {
    next_ = 0;
    for (Slot& slot : slots_) slot.last_use = {};
  }

 private:
  static constexpr int64_t kAlignment = 128;  // like the pools'

  SlabAllocator& allocator_;
  std::vector<Slot> slots_;
  size_t next_ = 0;
};

struct GroupSetting {
  ParameterKind kind;
  Grid grid;
  MeshShape shape;      // of the grid
  MeshCoordinate rank;  // in the grid
  int64_t num_losses;   // that a gradient is the mean over, in a backward or in all lanes
  int64_t micro_steps;  // of lanes in a cycle; 0: there are no lanes
  int64_t num_copies;   // of each contribution to a gradient, on ranks of the grid
  c10::Device device;
  Strategy strategy;  // of this unit; a unit may keep its weights whole
  PrecisionTypes precision;
  Quantization quantization;
  Granularity granularity;
  GradientOf gradient = GradientOf::kMeanOverRanks;
  GradientLifetime gradient_lifetime = GradientLifetime::kPersistent;
  Offload offload;
  GroupMemory memory;
  WireSlots& wire_slots;

  bool has_lanes() const { return micro_steps > 0; }
};

}  // namespace fsdp
