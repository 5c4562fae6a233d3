// Memory from libtorch's own allocators, whose statistics then count it too: on a device, or on the
// host where a device can copy from and to it.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Allocator.h>
#include <c10/core/Device.h>

#include <string>
#include <unordered_map>

#include "fsdp/memory/slab_allocator.h"

namespace fsdp {

// Memory of a device. It belongs to the stream that is current when it is allocated: libtorch may
// hand it to others, in the order of that stream, once it is released. So release it when nothing
// uses it any more. For the CPU there is HostSlabAllocator.
class DeviceSlabAllocator final : public SlabAllocator {
 public:
  explicit DeviceSlabAllocator(c10::Device device);

  void* allocate(int64_t bytes, int64_t alignment) override;
  void deallocate(void* address, int64_t bytes, int64_t alignment) noexcept override;

 private:
  const c10::Device device_;
  const std::string name_;
  std::unordered_map<void*, c10::DataPtr> given_out_;
};

// Host memory that a device can copy from and to by itself.
class PinnedSlabAllocator final : public SlabAllocator {
 public:
  void* allocate(int64_t bytes, int64_t alignment) override;
  void deallocate(void* address, int64_t bytes, int64_t alignment) noexcept override;

 private:
  std::unordered_map<void*, at::Tensor> given_out_;
};

}  // namespace fsdp
