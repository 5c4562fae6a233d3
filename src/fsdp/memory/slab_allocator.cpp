#include "fsdp/memory/slab_allocator.h"

#include <new>

#include "fsdp/base/check.h"
#include "fsdp/base/text.h"

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

}  // namespace fsdp
