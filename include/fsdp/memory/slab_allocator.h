// Where a pool's memory comes from: an interface, the host's implementation and an owning handle.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>

namespace fsdp {

// Hands out large pieces of memory. Pools ask for few of them, so an implementation may be slow
// (register with NCCL, synchronise a device). Must outlive every Slab it gave out.
class SlabAllocator {
 public:
  virtual ~SlabAllocator() = default;

  // `bytes` > 0, `alignment` a power of two. Throws Error when there is not enough.
  virtual void* allocate(int64_t bytes, int64_t alignment) = 0;
  virtual void deallocate(void* address, int64_t bytes, int64_t alignment) noexcept = 0;
};

// Ordinary host memory, not initialised.
class HostSlabAllocator final : public SlabAllocator {
 public:
  void* allocate(int64_t bytes, int64_t alignment) override;
  void deallocate(void* address, int64_t bytes, int64_t alignment) noexcept override;
};

// Owns one piece; nothing for 0 bytes.
class Slab {
 public:
  Slab() = default;
  Slab(SlabAllocator& allocator, int64_t bytes, int64_t alignment)
      : allocator_(&allocator),
        address_(bytes > 0 ? allocator.allocate(bytes, alignment) : nullptr),
        bytes_(bytes),
        alignment_(alignment) {}
  Slab(Slab&& other) noexcept
      : allocator_(other.allocator_),
        address_(std::exchange(other.address_, nullptr)),
        bytes_(std::exchange(other.bytes_, 0)),
        alignment_(other.alignment_) {}
  Slab& operator=(Slab&& other) noexcept {
    std::swap(allocator_, other.allocator_);
    std::swap(address_, other.address_);
    std::swap(bytes_, other.bytes_);
    std::swap(alignment_, other.alignment_);
    return *this;
  }
  ~Slab() {
    if (address_ != nullptr) allocator_->deallocate(address_, bytes_, alignment_);
  }

  void* at(int64_t offset) const { return static_cast<std::byte*>(address_) + offset; }
  int64_t bytes() const { return bytes_; }

 private:
  SlabAllocator* allocator_ = nullptr;
  void* address_ = nullptr;
  int64_t bytes_ = 0;
  int64_t alignment_ = 1;
};

}  // namespace fsdp
