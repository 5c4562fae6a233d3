#include "fsdp/shard/engine/engine_memory.h"

#include "fsdp/memory/device_slab_allocator.h"

namespace fsdp {

namespace {

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
