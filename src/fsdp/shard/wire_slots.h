// Where main gradients become what travels, before the reductions that end a cycle.
#pragma once

#include <cstdint>
#include <vector>

#include "fsdp/comm/work.h"
#include "fsdp/memory/slab_allocator.h"

namespace fsdp {

// A cast to the wire type needs memory until its reduction has ended. Groups take turns in slots
// that fit any of them, as many as such a reduction has stages: each stage's communicator is busy
// with one. A group's cast follows the reduction that had the slot before, on the communicator and
// not on the stream that computes, which never waits for either.
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

  // All reductions have ended: the next cycle begins with the first slot, and waits for nobody.
  void end_cycle() {
    next_ = 0;
    for (Slot& slot : slots_) slot.last_use = {};
  }

 private:
  static constexpr int64_t kAlignment = 128;  // as the pools'

  SlabAllocator& allocator_;
  std::vector<Slot> slots_;
  size_t next_ = 0;
};

}  // namespace fsdp
