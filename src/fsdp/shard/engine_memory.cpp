#include "fsdp/shard/engine_memory.h"

#include "fsdp/memory/device_slab_allocator.h"

namespace fsdp {

namespace {

std::unique_ptr<SlabAllocator> allocator_for(c10::Device device) {
  if (device.is_cpu()) return std::make_unique<HostSlabAllocator>();
  return std::make_unique<DeviceSlabAllocator>(device);
}

}  // namespace

EngineMemory::EngineMemory(SlabAllocator* given, c10::Device device) {
  if (given == nullptr) own_ = allocator_for(device);
  SlabAllocator& base = given != nullptr ? *given : *own_;
  for (size_t i = 0; i < by_kind_.size(); ++i)
    by_kind_[i].emplace(base, ledger_, static_cast<MemoryKind>(i));
}

GroupMemory EngineMemory::for_groups() {
  return {.weight = of(MemoryKind::kWeight),
          .main_weight = of(MemoryKind::kMainWeight),
          .main_grad = of(MemoryKind::kMainGrad),
          .reduction = of(MemoryKind::kReduction)};
}

}  // namespace fsdp
