#include "fsdp/shard/engine_memory.h"

#include "fsdp/memory/device_pinned_allocator.h"
#include "fsdp/memory/device_slab_allocator.h"

namespace fsdp {

namespace {

std::unique_ptr<SlabAllocator> allocator_for(c10::Device device) {
  if (device.is_cpu()) return std::make_unique<HostSlabAllocator>();
  return std::make_unique<DeviceSlabAllocator>(device);
}

// Where there is no device nothing has to be pinned for it.
std::unique_ptr<SlabAllocator> host_allocator_for(c10::Device device, const Offload& offload) {
  if (device.is_cpu() || !offload.pin) return std::make_unique<HostSlabAllocator>();
  return std::make_unique<PinnedSlabAllocator>();
}

}  // namespace

EngineMemory::Place::Place(SlabAllocator* given, std::unique_ptr<SlabAllocator> otherwise)
    : own(std::move(otherwise)) {
  SlabAllocator& base = given != nullptr ? *given : *own;
  for (size_t i = 0; i < by_kind.size(); ++i)
    by_kind[i].emplace(base, ledger, static_cast<MemoryKind>(i));
}

EngineMemory::EngineMemory(const ShardOptions& options, c10::Device device)
    : device_(options.allocator, allocator_for(device)),
      host_(options.host_allocator, host_allocator_for(device, options.offload)) {}

GroupMemory EngineMemory::for_groups() {
  return {.weight = of(MemoryKind::kWeight),
          .main_weight = of(MemoryKind::kMainWeight),
          .main_grad = of(MemoryKind::kMainGrad),
          .reduction = of(MemoryKind::kReduction),
          .host = on_host(MemoryKind::kMainWeight)};
}

}  // namespace fsdp
