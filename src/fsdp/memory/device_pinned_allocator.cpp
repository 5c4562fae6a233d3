#include "fsdp/memory/device_pinned_allocator.h"

#include <ATen/ATen.h>

#include "fsdp/base/error.h"

namespace fsdp {

void* PinnedSlabAllocator::allocate(int64_t bytes, int64_t alignment) {
  at::Tensor memory = at::empty({bytes}, at::dtype(at::kByte).pinned_memory(true));
  void* address = memory.mutable_data_ptr();
  FSDP_CHECK(reinterpret_cast<uintptr_t>(address) % static_cast<uintptr_t>(alignment) == 0,
             "pinned host memory is aligned to less than the ", alignment, " bytes asked for");
  given_out_.emplace(address, std::move(memory));
  return address;
}

void PinnedSlabAllocator::deallocate(void* address, int64_t, int64_t) noexcept {
  given_out_.erase(address);
}

}  // namespace fsdp
