#include "fsdp/memory/memory_ledger.h"

#include <algorithm>

#include "fsdp/base/integer.h"

namespace fsdp {

std::string_view name_of(MemoryKind kind) {
  switch (kind) {
    case MemoryKind::kWeight:
      return "weight";
    case MemoryKind::kMainWeight:
      return "main_weight";
    case MemoryKind::kMainGrad:
      return "main_grad";
    case MemoryKind::kPool:
      return "pool";
    case MemoryKind::kReduction:
      return "reduction";
    case MemoryKind::kMoment:
      return "moment";
    case MemoryKind::kStaging:
      return "staging";
    case MemoryKind::kWorkspace:
      return "workspace";
  }
  return "?";
}

void MemoryLedger::add(MemoryKind kind, int64_t bytes) {
  for (Count* count : {&counts_[static_cast<size_t>(kind)], &total_}) {
    count->now = checked_add(count->now, bytes);
    count->peak = std::max(count->peak, count->now);
  }
}

void MemoryLedger::remove(MemoryKind kind, int64_t bytes) noexcept {
  counts_[static_cast<size_t>(kind)].now -= bytes;
  total_.now -= bytes;
}

void MemoryLedger::reset_peak() {
  for (Count& count : counts_) count.peak = count.now;
  total_.peak = total_.now;
}

void* LedgerAllocator::allocate(int64_t bytes, int64_t alignment) {
  void* address = base_.allocate(bytes, alignment);  // may throw: then nothing was allocated
  ledger_.add(kind_, bytes);
  return address;
}

void LedgerAllocator::deallocate(void* address, int64_t bytes, int64_t alignment) noexcept {
  base_.deallocate(address, bytes, alignment);
  ledger_.remove(kind_, bytes);
}

}  // namespace fsdp
