#include "fsdp/memory/device_slab_allocator.h"

#include <ATen/ATen.h>
#include <ATen/Context.h>
#include <c10/core/DeviceGuard.h>
#include <c10/util/Exception.h>

#include <cstdint>

#include "fsdp/base/check.h"

namespace fsdp {

DeviceSlabAllocator::DeviceSlabAllocator(c10::Device device)
    : device_(device), name_(device.str()) {
  FSDP_CHECK(!device.is_cpu(), "device of a DeviceSlabAllocator is '", name_,
             "': use a HostSlabAllocator for host memory");
  FSDP_CHECK(device.has_index(), "device of a DeviceSlabAllocator is '", name_,
             "': name one, such as ", name_, ":0");
  at::globalContext().lazyInitDevice(device.type());
}

void* DeviceSlabAllocator::allocate(int64_t bytes, int64_t alignment) {
  const c10::DeviceGuard guard(device_);
  c10::DataPtr memory;
  try {
    memory = c10::GetAllocator(device_.type())->allocate(static_cast<size_t>(bytes));
  } catch (const c10::OutOfMemoryError& error) {
    throw Error(concat(name_, " has no ", bytes_text(static_cast<double>(bytes)),
                       " of memory left for a bucket pool; choose a smaller prefetch or a smaller "
                       "pool (",
                       error.what_without_backtrace(), ")"));
  }
  void* address = memory.get();
  FSDP_CHECK(reinterpret_cast<uintptr_t>(address) % static_cast<uintptr_t>(alignment) == 0,
             "alignment of a bucket pool on ", name_, " is ", alignment,
             ": libtorch's allocator there does not align that far; choose 512 or less");
  given_out_.emplace(address, std::move(memory));
  return address;
}

void DeviceSlabAllocator::deallocate(void* address, int64_t /*bytes*/,
                                     int64_t /*alignment*/) noexcept {
  given_out_.erase(address);
}

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
