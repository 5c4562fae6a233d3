#include "fsdp/shard/engine/engine_memory.h"

#include <c10/core/DeviceGuard.h>

#include <algorithm>
#include <cstdint>
#include <set>
#include <utility>

#include "fsdp/base/check.h"
#include "fsdp/base/integer.h"
#include "fsdp/base/log.h"
#include "fsdp/comm/backends.h"
#include "fsdp/memory/device_slab_allocator.h"

namespace fsdp {

namespace {

// NCCL's memory comes in pages of 2 MiB, of which a norm's weights would waste most.
constexpr int64_t kChunkBytes = int64_t{32} << 20;

struct AxisUse {
  const MeshAxis& axis;
  bool communicates;
  Placement parameter;
  Placement gradient;
  Placement optimizer;
};

std::vector<AxisUse> axes_of(const Mesh& mesh, MeshShape shape, const Strategy& strategy) {
  return {{mesh.inner(), shape.communicates_inner(), strategy.parameter.inner,
           strategy.gradient.inner, strategy.optimizer.inner},
          {mesh.outer(), shape.communicates_outer(), strategy.parameter.outer,
           strategy.gradient.outer, strategy.optimizer.outer}};
}

// The communicators whose operations read or write memory of this kind.
std::vector<Communicator*> users_of(MemoryKind kind, const std::vector<AxisUse>& axes) {
  std::vector<Communicator*> users;
  for (const AxisUse& axis : axes) {
    if (!axis.communicates) continue;
    const bool ends_cycle = axis.gradient == Placement::kPartial;
    const bool unshards = axis.parameter == Placement::kShard;
    const bool refreshes = axis.optimizer == Placement::kShard && !unshards;
    const bool gathers =
        kind == MemoryKind::kWeight ? unshards || refreshes : kind == MemoryKind::kPool && unshards;
    const bool reduces = kind == MemoryKind::kMainGrad ||
                         (kind == MemoryKind::kPool && !ends_cycle) ||
                         (kind == MemoryKind::kReduction && ends_cycle);
    if (gathers) users.push_back(&axis.axis.gather());
    if (reduces) users.push_back(&axis.axis.reduce());
  }
  return users;
}

std::unique_ptr<SlabAllocator> allocator_for(c10::Device device) {
  if (device.is_cpu()) return std::make_unique<HostSlabAllocator>();
  return std::make_unique<DeviceSlabAllocator>(device);
}

// Without a device, nothing has to be pinned.
std::unique_ptr<SlabAllocator> host_allocator_for(c10::Device device, const Offload& offload) {
  if (device.is_cpu() || !offload.pin) return std::make_unique<HostSlabAllocator>();
  return std::make_unique<PinnedSlabAllocator>();
}

}  // namespace

RegisteredSlabs::RegisteredSlabs(std::vector<Communicator*> users, c10::Device device,
                                 UserBuffers best)
    : users_(std::move(users)), device_(device), best_(best) {}

void* RegisteredSlabs::allocate(int64_t bytes, int64_t alignment) {
  const auto begin_in = [&](const Chunk& chunk) { return round_up(chunk.used_bytes, alignment); };
  if (chunks_.empty() || begin_in(chunks_.back()) + bytes > chunks_.back().bytes) {
    const c10::DeviceGuard guard(device_);
    const int64_t chunk_bytes = std::max(bytes, kChunkBytes);
    chunks_.push_back({nccl_allocate(chunk_bytes), chunk_bytes});
  }
  Chunk& chunk = chunks_.back();
  const int64_t begin = begin_in(chunk);
  chunk.used_bytes = begin + bytes;
  ++chunk.num_pieces;
  char* address = static_cast<char*>(chunk.address) + begin;
  FSDP_ASSERT(reinterpret_cast<uintptr_t>(address) % static_cast<uintptr_t>(alignment) == 0);
  return address;
}

void RegisteredSlabs::deallocate(void* address, int64_t /*bytes*/, int64_t /*alignment*/) noexcept {
  const auto chunk = std::find_if(chunks_.begin(), chunks_.end(), [&](const Chunk& each) {
    const auto* begin = static_cast<const char*>(each.address);
    return begin <= address && address < begin + each.bytes;
  });
  if (chunk == chunks_.end() || --chunk->num_pieces > 0) return;
  for (Communicator* user : users_) user->nccl()->deregister_memory(chunk->address);
  const c10::DeviceGuard guard(device_);
  nccl_deallocate(chunk->address);
  chunks_.erase(chunk);
}

bool RegisteredSlabs::has_new() const {
  return std::any_of(chunks_.begin(), chunks_.end(),
                     [](const Chunk& chunk) { return !chunk.is_registered; });
}

int64_t RegisteredSlabs::num_bytes() const {
  int64_t bytes = 0;
  for (const Chunk& chunk : chunks_) bytes += chunk.bytes;
  return bytes;
}

RegisteredMemory RegisteredSlabs::register_new() {
  RegisteredMemory worst{best_, ""};
  for (Chunk& chunk : chunks_) {
    if (std::exchange(chunk.is_registered, true)) continue;
    for (Communicator* user : users_) {
      RegisteredMemory became = user->nccl()->register_memory(chunk.address, chunk.bytes, best_);
      if (became.use < worst.use) worst = std::move(became);
    }
  }
  return worst;
}

UserBufferMemory::UserBufferMemory(const Mesh& mesh, MeshShape shape, const ShardOptions& options,
                                   c10::Device device) {
  // A window must have the same size on every rank; shards of whole tensors differ in size.
  const bool is_even =
      options.granularity != Granularity::tensor() && options.matrices == WholeMatrices{};
  const UserBuffers best =
      is_even ? options.user_buffers : std::min(options.user_buffers, UserBuffers::kRegistered);
  if (best != options.user_buffers) why_not_better_ = "shards of whole tensors differ in size";
  const std::vector<AxisUse> axes = axes_of(mesh, shape, options.strategy);
  for (const MemoryKind kind :
       {MemoryKind::kWeight, MemoryKind::kPool, MemoryKind::kMainGrad, MemoryKind::kReduction}) {
    const bool stays =
        kind != MemoryKind::kMainGrad || options.gradient_lifetime == GradientLifetime::kPersistent;
    if (!stays) continue;
    std::vector<Communicator*> users = users_of(kind, axes);
    if (!users.empty()) by_kind_[static_cast<size_t>(kind)].emplace(std::move(users), device, best);
  }
}

SlabAllocator* UserBufferMemory::of(MemoryKind kind) {
  std::optional<RegisteredSlabs>& slabs = by_kind_[static_cast<size_t>(kind)];
  return slabs ? &*slabs : nullptr;
}

void UserBufferMemory::begin_pass(int64_t num_backwards) {
  if (num_backwards == 0) return;
  const bool has_new = std::any_of(by_kind_.begin(), by_kind_.end(),
                                   [](const auto& slabs) { return slabs && slabs->has_new(); });
  if (has_new) {
    register_new();
    registered_after_ = num_backwards;
  } else if (registered_after_ >= 0 && num_backwards > registered_after_) {
    report();
    registered_after_ = -1;
  }
}

void UserBufferMemory::register_new() {
  for (auto& slabs : by_kind_) {
    if (!slabs || !slabs->has_new()) continue;
    const std::string why_not_better = slabs->register_new().why_not_better;
    if (!why_not_better.empty()) why_not_better_ = why_not_better;
  }
}

// NCCL still decides which memory it uses in place, depending on where the other ranks are.
void UserBufferMemory::report() const {
  if (thread_rank() > 0) return;
  std::string words;
  std::set<const Communicator*> reported;
  int64_t num_bytes = 0;
  for (const auto& slabs : by_kind_) {
    if (!slabs) continue;
    num_bytes += slabs->num_bytes();
    for (Communicator* user : slabs->users()) {
      if (!reported.insert(user).second) continue;
      for (const auto& [kind, use] : user->nccl()->used_buffers())
        words += concat("; ", user->name(), " ", name_of(kind), " ",
                        use == UserBuffers::kOff ? "copied" : name_of(use));
    }
  }
  log(LogLevel::kInfo, "user buffers: ", bytes_text(static_cast<double>(num_bytes)),
      " known to NCCL ", nccl_version(), words,
      why_not_better_.empty() ? "" : concat("; not better because ", why_not_better_));
}

std::unique_ptr<UserBufferMemory> make_user_buffer_memory(const Mesh& mesh, MeshShape shape,
                                                          const ShardOptions& options,
                                                          c10::Device device) {
  if (options.user_buffers == UserBuffers::kOff) return nullptr;
  // First, because it is never possible.
  for (const GridKind kind : mesh.grids())
    if (const MeshAxis* owners = mesh.grid(kind).owners)
      throw UsageError(concat("user_buffers is ", name_of(options.user_buffers), " on a mesh with ",
                              owners->name(), " ", owners->size(),
                              ", whose slices use other communicators than the rest, but the same "
                              "memory in turn (docs/gpu.md); set it to off"));
  if (mesh.inner().gather().nccl() == nullptr || device.is_cpu())
    throw UsageError(concat("user_buffers is ", name_of(options.user_buffers),
                            ", but the ranks of this job do not talk by NCCL on GPUs, which alone "
                            "uses them; set it to off"));
  return std::make_unique<UserBufferMemory>(mesh, shape, options, device);
}

EngineMemory::Place::Place(SlabAllocator* given, std::unique_ptr<SlabAllocator> otherwise,
                           UserBufferMemory* registered)
    : own(std::move(otherwise)) {
  SlabAllocator& base = given != nullptr ? *given : *own;
  for (size_t i = 0; i < by_kind.size(); ++i) {
    const auto kind = static_cast<MemoryKind>(i);
    SlabAllocator* special = registered != nullptr ? registered->of(kind) : nullptr;
    by_kind[i].emplace(special != nullptr ? *special : base, ledger, kind);
  }
}

EngineMemory::EngineMemory(const ShardOptions& options, c10::Device device,
                           UserBufferMemory* registered)
    : device_(options.allocator, allocator_for(device), registered),
      host_(options.host_allocator, host_allocator_for(device, options.offload), nullptr) {}

GroupMemory EngineMemory::for_groups() {
  return {.weight = of(MemoryKind::kWeight),
          .main_weight = of(MemoryKind::kMainWeight),
          .main_grad = of(MemoryKind::kMainGrad),
          .host = on_host(MemoryKind::kMainWeight)};
}

}  // namespace fsdp
