#include "fsdp/memory/slab_allocator.h"

#include <atomic>
#include <new>

#include "fsdp/base/error.h"
#include "fsdp/base/text.h"

namespace fsdp {

namespace {

// Note [Staggered pieces]
// Large pieces come from the system in whole pages, so that all of them would begin in the same
// place. Loops over several of them, as an update is, would then want the same few lines of the
// core's first cache for all of them, and come to the ends of all pages at once: up to 10 % of an
// update's time (bench/results/2026-11-16-optim.md). So they begin in different places of these
// bytes; what lies before is never touched, and costs addresses but no memory.
constexpr int64_t kStaggeredBytes = 65536;
constexpr int64_t kLargeBytes = int64_t{4} << 20;
constexpr int64_t kPlaceBytes = 128;

bool is_staggered(int64_t bytes, int64_t alignment) {
  return bytes >= kLargeBytes && alignment <= kPlaceBytes;
}

// Each begins 6272 bytes after the last, modulo the 16 KiB that a way of a cache has, which is near
// the golden section: the next few are far from it, too.
int64_t next_place() {
  static std::atomic<uint32_t> count = 0;
  return count.fetch_add(1, std::memory_order_relaxed) * (16384 + 6272) % kStaggeredBytes;
}

std::align_val_t aligned_to(int64_t alignment) {
  return std::align_val_t{static_cast<size_t>(alignment)};
}

}  // namespace

void* HostSlabAllocator::allocate(int64_t bytes, int64_t alignment) {
  const bool staggered = is_staggered(bytes, alignment);
  const int64_t whole = staggered ? bytes + kStaggeredBytes : bytes;
  void* const address =
      ::operator new(static_cast<size_t>(whole),
                     aligned_to(staggered ? kStaggeredBytes : alignment), std::nothrow);
  FSDP_CHECK(address != nullptr, "the host has no ", bytes_text(static_cast<double>(bytes)),
             " of memory left for a bucket pool; choose a smaller prefetch or a smaller pool");
  return staggered ? static_cast<std::byte*>(address) + next_place() : address;
}

void HostSlabAllocator::deallocate(void* address, int64_t bytes, int64_t alignment) noexcept {
  if (is_staggered(bytes, alignment)) {
    const auto place = reinterpret_cast<uintptr_t>(address) % kStaggeredBytes;
    address = static_cast<std::byte*>(address) - place;
    alignment = kStaggeredBytes;
  }
  ::operator delete(address, aligned_to(alignment));
}

}  // namespace fsdp
