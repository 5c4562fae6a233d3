// The memory of one sharded model: counted, by kind, on the model's device and on the host.
#pragma once

#include <c10/core/Device.h>

#include <array>
#include <memory>
#include <optional>

#include "fsdp/memory/memory_ledger.h"
#include "fsdp/shard/engine/user_buffer_memory.h"
#include "fsdp/shard/group/group_setting.h"

namespace fsdp {

class EngineMemory {
 public:
  // From the user's allocators, or from default ones for the device; memory that collectives touch
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
