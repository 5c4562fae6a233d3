// Updates the offloaded state on the host: chunks of gradients come down, weights go back up.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>

#include <array>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "fsdp/memory/slab_allocator.h"
#include "fsdp/optim/shard_passes.h"
#include "fsdp/optim/task_queue.h"
#include "fsdp/optim/update_state.h"
#include "fsdp/shard/engine/engine_memory.h"

namespace fsdp {

// Three queues, so that while one chunk is updated the next comes down and the last one goes up:
//
//   down      | g0 | g1 | g2 | g3 |             gradients, in their own type
//   host           | u0 | u1 | u2 | u3 |        a thread: the same kernel as on the CPU
//   up                  | w0 | w1 | w2 | w3 |   weights, in theirs
//
// The host queue drives the other two, because on a device only it knows when a chunk is updated. A
// chunk on its way has one of kSlots slots of staging memory. Chunks of all units of a step form
// one line, so that nothing stops at the end of a unit. If the model is on the CPU, the queues are
// threads and the copies are plain copies, so everything runs everywhere.
class HostUpdates {
 public:
  static constexpr size_t kSlots = 3;

  HostUpdates(EngineMemory& memory, c10::Device device, const Offload& offload, UpdateMath math);

  // Allocates the staging memory that these groups need; call it before the first step.
  void reserve(const std::vector<GroupUpdate>& groups);

  // Between steps.
  void set_math(const UpdateMath& math) { math_ = math; }

  // Begins a step with `state`, the bytes of a StepState on the device, after `begun`.
  void begin(const at::Tensor& state, const Work& begun);
  // Updates the offloaded pieces of a unit's groups. The result is done when `beside`, the rest of
  // the unit's update, is done, too.
  Work run(const std::vector<GroupUpdate>& groups, const Work& beside);

 private:
  // Elements that travel together, all from one span.
  struct Chunk {
    UpdateSpan span;      // without gradient; without weight unless that is on the host
    at::Tensor gradient;  // on the device
    at::Tensor weight;    // on the device
  };
  struct Slot {
    Slab gradient;
    Slab weight;
    Work down;  // of the gradients in it
    Work up;    // of the chunk that had the slot before
  };

  std::vector<Chunk> chunks_of(const std::vector<GroupUpdate>& groups) const;
  void run_first_chunk();
  // Brings down as many of the first chunks as there are slots.
  void bring_down_first_chunks();
  // Returns the updated weights, on the host.
  at::Tensor update(const Chunk& chunk, const Slot& slot);

  EngineMemory& memory_;
  // Devices only: the host queue's current stream, on which nothing computes.
  std::optional<c10::Stream> idle_;
  const int64_t chunk_numel_;
  UpdateMath math_;
  ThreadTeam team_;   // of the host queue's thread
  at::Tensor state_;  // of this step, on the host
  Work state_is_here_;
  std::array<Slot, kSlots> slots_;
  size_t first_slot_ = 0;  // of the first waiting chunk; the host's tasks alone use it and the next
  size_t num_coming_ = 0;  // how many of the first chunks have a slot
  std::mutex mutex_;       // protects the member below
  std::deque<Chunk> queue_;  // of a step: empty before the next one begins
  TaskQueue down_;           // gradients
  TaskQueue up_;             // weights
  TaskQueue host_;           // updates
};

}  // namespace fsdp
