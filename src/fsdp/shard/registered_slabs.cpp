#include "fsdp/shard/registered_slabs.h"

#include <c10/core/DeviceGuard.h>

#include <algorithm>
#include <cstdint>
#include <utility>

#include "fsdp/base/error.h"
#include "fsdp/base/log.h"
#include "fsdp/comm/connect_nccl.h"

namespace fsdp {

namespace {

// Those whose operations read or write the pool's memory.
std::vector<Communicator*> users_of(const Mesh& mesh, MeshShape shape, const Strategy& strategy) {
  std::vector<Communicator*> users;
  if (shape.communicates_inner()) {
    users.push_back(&mesh.inner().gather());
    users.push_back(&mesh.inner().reduce());
  }
  if (shape.communicates_outer()) {
    if (strategy.parameter.outer == Placement::kShard) users.push_back(&mesh.outer().gather());
    if (strategy.gradient.outer != Placement::kPartial) users.push_back(&mesh.outer().reduce());
  }
  return users;
}

}  // namespace

RegisteredSlabs::RegisteredSlabs(std::vector<Communicator*> users, c10::Device device,
                                 UserBuffers best)
    : users_(std::move(users)), device_(device), best_(best), name_(device.str() + " (NCCL)") {}

void* RegisteredSlabs::allocate(int64_t bytes, int64_t alignment) {
  const c10::DeviceGuard guard(device_);
  void* address = nccl_allocate(bytes);
  FSDP_ASSERT(reinterpret_cast<uintptr_t>(address) % static_cast<uintptr_t>(alignment) == 0);
  pieces_.push_back({address, bytes});
  return address;
}

void RegisteredSlabs::deallocate(void* address, int64_t /*bytes*/, int64_t /*alignment*/) noexcept {
  for (Communicator* user : users_) user->deregister_memory(address);
  std::erase_if(pieces_, [&](const Piece& piece) { return piece.address == address; });
  const c10::DeviceGuard guard(device_);
  nccl_deallocate(address);
}

void RegisteredSlabs::register_new() {
  RegisteredMemory worst{best_, ""};
  int64_t num_bytes = 0;
  for (Piece& piece : pieces_) {
    if (std::exchange(piece.is_registered, true)) continue;
    num_bytes += piece.bytes;
    for (Communicator* user : users_) {
      RegisteredMemory became = user->register_memory(piece.address, piece.bytes, best_);
      if (became.use < worst.use) worst = std::move(became);
    }
  }
  if (num_bytes == 0 || thread_rank() > 0) return;
  log(LogLevel::kInfo, "user buffers: ", bytes_text(static_cast<double>(num_bytes)),
      " of gathered weights and gradients, ", name_of(worst.use), " with ", users_.size(),
      " communicators of NCCL ", nccl_version(),
      worst.why_not_better.empty() ? "" : concat(", not better because ", worst.why_not_better));
}

std::unique_ptr<RegisteredSlabs> make_registered_slabs(const Mesh& mesh, MeshShape shape,
                                                       const ShardOptions& options,
                                                       c10::Device device) {
  if (options.user_buffers == UserBuffers::kOff) return nullptr;
  if (!mesh.inner().gather().registers_memory() || device.is_cpu())
    throw UsageError(concat("user_buffers is ", name_of(options.user_buffers),
                            ", but the ranks of this job do not talk by NCCL on GPUs, which alone "
                            "uses them; set it to off"));
  return std::make_unique<RegisteredSlabs>(users_of(mesh, shape, options.strategy), device,
                                           options.user_buffers);
}

}  // namespace fsdp
