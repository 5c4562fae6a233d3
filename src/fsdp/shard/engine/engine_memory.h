// The memory of one sharded model: counted, by kind, on the model's device and on the host, and
// where NCCL can use it in place.
#pragma once

#include <c10/core/Device.h>

#include <array>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "fsdp/comm/backends.h"
#include "fsdp/comm/communicator.h"
#include "fsdp/comm/mesh.h"
#include "fsdp/memory/memory_ledger.h"
#include "fsdp/memory/slab_allocator.h"
#include "fsdp/shard/group/group_setting.h"
#include "fsdp/shard/options.h"

namespace fsdp {

// --- memory that NCCL uses in place --------------------------------------------------------------

// Memory of one kind: allocated by NCCL, in chunks that small pieces share, and registered with the
// communicators whose operations touch that kind. The communicators must outlive it.
class RegisteredSlabs final : public SlabAllocator {
 public:
  RegisteredSlabs(std::vector<Communicator*> users, c10::Device device, UserBuffers best);

  void* allocate(int64_t bytes, int64_t alignment) override;
  void deallocate(void* address, int64_t bytes, int64_t alignment) noexcept override;

  bool has_new() const;
  // Registers chunks allocated since the last call; returns the worst result.
  RegisteredMemory register_new();
  int64_t num_bytes() const;
  const std::vector<Communicator*>& users() const { return users_; }

 private:
  struct Chunk {
    void* address;
    int64_t bytes;
    int64_t used_bytes = 0;  // from the beginning of the chunk
    int64_t num_pieces = 0;  // that are still in use
    bool is_registered = false;
  };

  const std::vector<Communicator*> users_;
  const c10::Device device_;
  const UserBuffers best_;
  std::vector<Chunk> chunks_;  // in the order of allocation, which is every rank's
};

// Memory of every kind that this strategy's collectives touch. Registering is slow and collective,
// so it waits for the end of the first step, after which memory stays in place; the step after that
// shows the result.
class UserBufferMemory {
 public:
  UserBufferMemory(const Mesh& mesh, MeshShape shape, const ShardOptions& options,
                   c10::Device device);

  // nullptr if collectives do not touch this kind, or it does not stay in place.
  SlabAllocator* of(MemoryKind kind);

  // Begins a pass, after so many backwards. All ranks call it after the same allocations.
  void begin_pass(int64_t num_backwards);

 private:
  void register_new();
  void report() const;

  std::array<std::optional<RegisteredSlabs>, kNumMemoryKinds> by_kind_;
  std::string why_not_better_;
  int64_t registered_after_ = -1;  // backwards; -1: nothing to report
};

// Makes what options.user_buffers asks for; nullptr for kOff. UsageError if ranks do not use NCCL.
std::unique_ptr<UserBufferMemory> make_user_buffer_memory(const Mesh& mesh, MeshShape shape,
                                                          const ShardOptions& options,
                                                          c10::Device device);

// --- all memory ----------------------------------------------------------------------------------

class EngineMemory {
 public:
  // Takes the user's allocators, or default ones for the device; memory that collectives touch
  // comes from `registered`, if there is one.
  EngineMemory(const ShardOptions& options, c10::Device device, UserBufferMemory* registered);

  SlabAllocator& of(MemoryKind kind) { return device_.of(kind); }
  SlabAllocator& on_host(MemoryKind kind) { return host_.of(kind); }
  MemoryLedger& ledger() { return device_.ledger; }
  MemoryLedger& host_ledger() { return host_.ledger; }  // of offloaded state
  GroupMemory for_groups();

 private:
  struct Place {
    Place(SlabAllocator* given, std::unique_ptr<SlabAllocator> otherwise,
          UserBufferMemory* registered);
    SlabAllocator& of(MemoryKind kind) { return *by_kind[static_cast<size_t>(kind)]; }

    std::unique_ptr<SlabAllocator> own;  // if the user gave none
    MemoryLedger ledger;
    std::array<std::optional<LedgerAllocator>, kNumMemoryKinds> by_kind;
  };

  Place device_;
  Place host_;
};

}  // namespace fsdp
