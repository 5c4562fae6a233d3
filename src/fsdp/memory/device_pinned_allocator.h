// Host memory that a device can copy from and to by itself, from libtorch's own allocator.
#pragma once

#include <ATen/core/Tensor.h>

#include <unordered_map>

#include "fsdp/memory/slab_allocator.h"

namespace fsdp {

class PinnedSlabAllocator final : public SlabAllocator {
 public:
  void* allocate(int64_t bytes, int64_t alignment) override;
  void deallocate(void* address, int64_t bytes, int64_t alignment) noexcept override;
  std::string_view name() const override { return "pinned host"; }

 private:
  std::unordered_map<void*, at::Tensor> given_out_;
};

}  // namespace fsdp
