#include "fsdp/memory/memory_ledger.h"

#include <algorithm>
#include <new>

#include "fsdp/base/check.h"
#include "fsdp/base/integer.h"
#include "fsdp/base/text.h"
#include "fsdp/memory/slab_allocator.h"

namespace fsdp {

namespace {

std::align_val_t aligned_to(int64_t alignment) {
  return std::align_val_t{static_cast<size_t>(alignment)};
}

}  // namespace

void* HostSlabAllocator::allocate(int64_t bytes, int64_t alignment) {
  void* const address =
      ::operator new(static_cast<size_t>(bytes), aligned_to(alignment), std::nothrow);
  FSDP_CHECK(address != nullptr, "the host has no ", bytes_text(static_cast<double>(bytes)),
             " of memory left for a bucket pool; choose a smaller prefetch or a smaller pool");
  return address;
}

void HostSlabAllocator::deallocate(void* address, int64_t /*bytes*/, int64_t alignment) noexcept {
  ::operator delete(address, aligned_to(alignment));
}

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
  int64_t& of_kind = bytes_[static_cast<size_t>(kind)];
  of_kind = checked_add(of_kind, bytes);
  total_bytes_ = checked_add(total_bytes_, bytes);
  total_peak_bytes_ = std::max(total_peak_bytes_, total_bytes_);
}

void MemoryLedger::remove(MemoryKind kind, int64_t bytes) noexcept {
  bytes_[static_cast<size_t>(kind)] -= bytes;
  total_bytes_ -= bytes;
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
