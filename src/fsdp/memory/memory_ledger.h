// How many bytes of which kind a rank has allocated, now and at most.
#pragma once

#include <array>
#include <cstdint>
#include <string_view>

#include "fsdp/memory/slab_allocator.h"

namespace fsdp {

enum class MemoryKind : uint8_t {
  kWeight,      // weights as the parameter placements leave them
  kMainWeight,  // the optimizer's copy
  kMainGrad,    // gradients while they accumulate
  kPool,        // buckets: gathered weights and unreduced gradients
  kReduction,   // casts before the reductions that end a cycle
  kMoment,      // what the optimizer remembers, with its scales
  kStaging,     // what travels between a device and the optimizer's part on the host
  kWorkspace,   // what the optimizer computes in
};

inline constexpr int kNumMemoryKinds = 8;

// "weight", "main_weight", "main_grad", "pool", "reduction", "moment", "staging",
// "workspace"
std::string_view name_of(MemoryKind kind);

// Bytes as they are asked for, without an allocator's rounding, so that a forecast can be exact.
// Belongs to one rank and is used by one thread at a time.
class MemoryLedger {
 public:
  void add(MemoryKind kind, int64_t bytes);
  void remove(MemoryKind kind, int64_t bytes) noexcept;

  int64_t bytes(MemoryKind kind) const { return bytes_[static_cast<size_t>(kind)]; }
  int64_t total_bytes() const { return total_bytes_; }

  // The most at one time since the ledger was made.
  int64_t total_peak_bytes() const { return total_peak_bytes_; }

 private:
  std::array<int64_t, kNumMemoryKinds> bytes_ = {};
  int64_t total_bytes_ = 0;
  int64_t total_peak_bytes_ = 0;
};

// Passes everything on to another allocator and writes it down as one kind. Both must outlive it.
class LedgerAllocator final : public SlabAllocator {
 public:
  LedgerAllocator(SlabAllocator& base, MemoryLedger& ledger, MemoryKind kind)
      : base_(base), ledger_(ledger), kind_(kind) {}

  void* allocate(int64_t bytes, int64_t alignment) override;
  void deallocate(void* address, int64_t bytes, int64_t alignment) noexcept override;

 private:
  SlabAllocator& base_;
  MemoryLedger& ledger_;
  const MemoryKind kind_;
};

}  // namespace fsdp
