// Memory that tests watch: libtorch's allocations in a thread, and slabs that never come back.
#pragma once

#include <c10/core/Allocator.h>
#include <c10/util/ThreadLocalDebugInfo.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <memory>
#include <unordered_map>
#include <vector>

#include "fsdp/memory/slab_allocator.h"

namespace fsdp::testing {

// While it lives, counts what the calling thread allocates for CPU tensors.
class TensorAllocations {
 public:
  TensorAllocations()
      : counts_(std::make_shared<Counts>()), guard_(c10::DebugInfoKind::PROFILER_STATE, counts_) {}

  int64_t now_bytes() const { return counts_->now; }
  int64_t largest_bytes() const { return counts_->largest; }
  int64_t peak_bytes() const { return counts_->peak; }

 private:
  struct Counts final : c10::MemoryReportingInfoBase {
    void reportMemoryUsage(void*, int64_t bytes, size_t, size_t, c10::Device) override {
      now += bytes;
      peak = std::max(peak, now);
      largest = std::max(largest, bytes);
    }
    bool memoryProfilingEnabled() const override { return true; }
    int64_t now = 0;
    int64_t peak = 0;
    int64_t largest = 0;
  };

  std::shared_ptr<Counts> counts_;
  c10::DebugInfoGuard guard_;
};

// Hands out every address once, and fills released memory with NaN, so that late readers compute
// nonsense. Frees the memory in its destructor.
class OnceOnlyAllocator final : public SlabAllocator {
 public:
  ~OnceOnlyAllocator() override {
    for (const Piece& piece : gone_) base_.deallocate(piece.address, piece.bytes, piece.alignment);
  }
  void* allocate(int64_t bytes, int64_t alignment) override {
    void* address = base_.allocate(bytes, alignment);
    std::memset(address, 0xFF, static_cast<size_t>(bytes));
    live_bytes_ += bytes;
    ++num_allocations_;
    return address;
  }
  void deallocate(void* address, int64_t bytes, int64_t alignment) noexcept override {
    std::memset(address, 0xFF, static_cast<size_t>(bytes));
    live_bytes_ -= bytes;
    gone_.push_back({address, bytes, alignment});
  }

  int64_t live_bytes() const { return live_bytes_; }
  int64_t num_allocations() const { return num_allocations_; }

 private:
  struct Piece {
    void* address;
    int64_t bytes;
    int64_t alignment;
  };
  HostSlabAllocator base_;
  std::vector<Piece> gone_;
  int64_t live_bytes_ = 0;
  int64_t num_allocations_ = 0;
};

}  // namespace fsdp::testing
