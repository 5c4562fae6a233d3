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

  int64_t bytes(MemoryKind kind) const { return of(kind).now; }
  int64_t total_bytes() const { return total_.now; }

  // The most at one time since the ledger was made or the peaks were reset. Kinds peak at
  // different times, so the total's peak is at most the sum of theirs.
  int64_t peak_bytes(MemoryKind kind) const { return of(kind).peak; }
  int64_t total_peak_bytes() const { return total_.peak; }

  // Every peak becomes what is allocated now.
  void reset_peak();

 private:
  struct Count {
    int64_t now = 0;
    int64_t peak = 0;
  };
  const Count& of(MemoryKind kind) const { return counts_[static_cast<size_t>(kind)]; }

  std::array<Count, kNumMemoryKinds> counts_;
  Count total_;
};

// Passes everything on to another allocator and writes it down as one kind. Both must outlive it.
class LedgerAllocator final : public SlabAllocator {
 public:
  LedgerAllocator(SlabAllocator& base, MemoryLedger& ledger, MemoryKind kind)
      : base_(base), ledger_(ledger), kind_(kind) {}

  void* allocate(int64_t bytes, int64_t alignment) override;
  void deallocate(void* address, int64_t bytes, int64_t alignment) noexcept override;
  std::string_view name() const override { return base_.name(); }

 private:
  SlabAllocator& base_;
  MemoryLedger& ledger_;
  const MemoryKind kind_;
};

}  // namespace fsdp
