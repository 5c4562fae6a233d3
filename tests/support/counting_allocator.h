// A slab allocator that counts, for tests of a pool's real memory.
#pragma once

#include <algorithm>
#include <cstdint>
#include <map>

#include "fsdp/base/check.h"
#include "fsdp/memory/slab_allocator.h"

namespace fsdp::testing {

// Addresses without memory behind them, so that pools of any size can be tested; never the same
// address twice, so that a test cannot mistake a new piece for an old one.
class CountingAllocator final : public SlabAllocator {
 public:
  ~CountingAllocator() override = default;

  void* allocate(int64_t bytes, int64_t alignment) override {
    FSDP_ASSERT(bytes > 0);
    next_ = (next_ + alignment - 1) / alignment * alignment;
    void* address = reinterpret_cast<void*>(next_);  // NOLINT: never read
    pieces_[address] = bytes;
    next_ += bytes;
    live_bytes_ += bytes;
    peak_bytes_ = std::max(peak_bytes_, live_bytes_);
    ++num_allocations_;
    return address;
  }
  void deallocate(void* address, int64_t bytes, int64_t /*alignment*/) noexcept override {
    const auto piece = pieces_.find(address);
    if (piece == pieces_.end() || piece->second != bytes) {
      ++num_wrong_frees_;
      return;
    }
    pieces_.erase(piece);
    live_bytes_ -= bytes;
  }

  int64_t live_bytes() const { return live_bytes_; }
  int64_t peak_bytes() const { return peak_bytes_; }
  int64_t num_allocations() const { return num_allocations_; }
  int64_t num_wrong_frees() const { return num_wrong_frees_; }

 private:
  std::map<void*, int64_t> pieces_;
  int64_t next_ = int64_t{1} << 40;
  int64_t live_bytes_ = 0;
  int64_t peak_bytes_ = 0;
  int64_t num_allocations_ = 0;
  int64_t num_wrong_frees_ = 0;
};

// Host memory with its own count, independent of its user's.
class CountingHostAllocator final : public SlabAllocator {
 public:
  void* allocate(int64_t bytes, int64_t alignment) override {
    live_bytes_ += bytes;
    peak_bytes_ = std::max(peak_bytes_, live_bytes_);
    ++num_allocations_;
    return host_.allocate(bytes, alignment);
  }
  void deallocate(void* address, int64_t bytes, int64_t alignment) noexcept override {
    live_bytes_ -= bytes;
    host_.deallocate(address, bytes, alignment);
  }

  int64_t live_bytes() const { return live_bytes_; }
  int64_t peak_bytes() const { return peak_bytes_; }
  int64_t num_allocations() const { return num_allocations_; }
  // Sets the peak to the bytes that are live now.
  void restart_peak() { peak_bytes_ = live_bytes_; }

 private:
  HostSlabAllocator host_;
  int64_t live_bytes_ = 0;
  int64_t peak_bytes_ = 0;
  int64_t num_allocations_ = 0;
};

}  // namespace fsdp::testing
