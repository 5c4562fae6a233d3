// The memory that collectives read and write, where NCCL can use it in place.
#pragma once

#include <c10/core/Device.h>

#include <array>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "fsdp/comm/mesh.h"
#include "fsdp/memory/memory_ledger.h"
#include "fsdp/memory/slab_allocator.h"
#include "fsdp/shard/options.h"

namespace fsdp {

// Memory of one kind: allocated by NCCL, in chunks that small pieces share, and registered with the
// communicators whose operations touch that kind. The communicators must outlive it.
class RegisteredSlabs final : public SlabAllocator {
 public:
  RegisteredSlabs(std::vector<Communicator*> users, c10::Device device, UserBuffers best);

  void* allocate(int64_t bytes, int64_t alignment) override;
  void deallocate(void* address, int64_t bytes, int64_t alignment) noexcept override;
  std::string_view name() const override { return name_; }

  bool has_new() const;
  // Registers what was allocated since the last time; the worst of what came of it.
  RegisteredMemory register_new();
  int64_t num_bytes() const;
  const std::vector<Communicator*>& users() const { return users_; }

 private:
  struct Chunk {
    void* address;
    int64_t bytes;
    int64_t used_bytes = 0;  // from its beginning
    int64_t num_pieces = 0;  // that were not given back
    bool is_registered = false;
  };

  const std::vector<Communicator*> users_;
  const c10::Device device_;
  const UserBuffers best_;
  const std::string name_;
  std::vector<Chunk> chunks_;  // in the order of allocation, which is every rank's
};

// One for every kind of memory that this strategy's collectives touch. Registering is slow and
// collective, so it waits for the first step, after which memory stays where it is; the step after
// that shows what came of it.
class UserBufferMemory {
 public:
  UserBufferMemory(const Mesh& mesh, MeshShape shape, const ShardOptions& options,
                   c10::Device device);

  // nullptr where collectives do not touch it, or it does not stay.
  SlabAllocator* of(MemoryKind kind);

  // A pass begins, after so many backwards. All ranks call it when they have allocated the same.
  void begin_pass(int64_t num_backwards);

 private:
  void register_new();
  void report() const;

  std::array<std::optional<RegisteredSlabs>, kNumMemoryKinds> by_kind_;
  std::string why_not_better_;
  int64_t registered_after_ = -1;  // backwards; -1: nothing to report
};

// As options.user_buffers says; nullptr for kOff. UsageError where ranks do not talk by NCCL.
std::unique_ptr<UserBufferMemory> make_user_buffer_memory(const Mesh& mesh, MeshShape shape,
                                                          const ShardOptions& options,
                                                          c10::Device device);

}  // namespace fsdp
