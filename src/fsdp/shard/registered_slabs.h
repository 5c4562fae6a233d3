// The pool's memory where NCCL can use it in place.
#pragma once

#include <c10/core/Device.h>

#include <memory>
#include <string>
#include <vector>

#include "fsdp/comm/mesh.h"
#include "fsdp/memory/slab_allocator.h"
#include "fsdp/shard/options.h"

namespace fsdp {

// Allocated by NCCL, and registered with the communicators that gather into it and reduce from it
// when the engine says that it will stay: registering is slow and collective. The communicators
// must outlive it.
class RegisteredSlabs final : public SlabAllocator {
 public:
  RegisteredSlabs(std::vector<Communicator*> users, c10::Device device, UserBuffers best);

  void* allocate(int64_t bytes, int64_t alignment) override;
  void deallocate(void* address, int64_t bytes, int64_t alignment) noexcept override;
  std::string_view name() const override { return name_; }

  // Registers what was allocated since the last time, and says in the log what came of it. All
  // ranks call it when they have allocated the same.
  void register_new();

 private:
  struct Piece {
    void* address;
    int64_t bytes;
    bool is_registered = false;
  };

  const std::vector<Communicator*> users_;
  const c10::Device device_;
  const UserBuffers best_;
  const std::string name_;
  std::vector<Piece> pieces_;  // in the order of allocation, which is every rank's
};

// As options.user_buffers says; nullptr for kOff. UsageError where ranks do not talk by NCCL.
std::unique_ptr<RegisteredSlabs> make_registered_slabs(const Mesh& mesh, MeshShape shape,
                                                       const ShardOptions& options,
                                                       c10::Device device);

}  // namespace fsdp
