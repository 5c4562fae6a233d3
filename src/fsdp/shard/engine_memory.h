// The memory of one sharded model: counted, by kind.
#pragma once

#include <c10/core/Device.h>

#include <array>
#include <memory>
#include <optional>

#include "fsdp/memory/memory_ledger.h"
#include "fsdp/shard/group_setting.h"

namespace fsdp {

class EngineMemory {
 public:
  // `given` is the user's allocator, or nullptr for one that fits the device.
  EngineMemory(SlabAllocator* given, c10::Device device);

  SlabAllocator& of(MemoryKind kind) { return *by_kind_[static_cast<size_t>(kind)]; }
  MemoryLedger& ledger() { return ledger_; }
  GroupMemory for_groups();

 private:
  std::unique_ptr<SlabAllocator> own_;  // when none was given
  MemoryLedger ledger_;
  std::array<std::optional<LedgerAllocator>, kNumMemoryKinds> by_kind_;
};

}  // namespace fsdp
