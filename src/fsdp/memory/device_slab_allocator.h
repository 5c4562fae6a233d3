// A pool's memory on a device, from libtorch's own allocator, so that its statistics count it too.
#pragma once

#include <c10/core/Allocator.h>
#include <c10/core/Device.h>

#include <string>
#include <unordered_map>

#include "fsdp/memory/slab_allocator.h"

namespace fsdp {

// Memory belongs to the stream that is current when it is allocated: libtorch may hand it to
// others, in the order of that stream, once it is given back. So give it back when nothing uses it
// any more. For the CPU there is HostSlabAllocator.
class DeviceSlabAllocator final : public SlabAllocator {
 public:
  explicit DeviceSlabAllocator(c10::Device device);

  void* allocate(int64_t bytes, int64_t alignment) override;
  void deallocate(void* address, int64_t bytes, int64_t alignment) noexcept override;
  std::string_view name() const override { return name_; }

 private:
  const c10::Device device_;
  const std::string name_;
  std::unordered_map<void*, c10::DataPtr> given_out_;
};

}  // namespace fsdp
