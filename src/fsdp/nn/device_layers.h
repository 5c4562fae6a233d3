// Where the kernels of layers_on_device.h are used, and what every call of one needs.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/DeviceGuard.h>

#include "fsdp/base/device_stream.h"
#include "fsdp/base/torch_dtype.h"
#include "fsdp/nn/layers_on_device.h"

namespace fsdp::nn {

// Whether kernels of ours compute what is asked of this tensor. Environment: FSDP_LAYERS=kernels
// (default) or aten, which is for comparisons.
bool has_kernels(const at::Tensor& tensor);

// Dense, and at a multiple of 16 bytes: the tensor itself, or a copy.
at::Tensor dense_packs(const at::Tensor& tensor);

// While it lives, the tensor's device is the current one.
class OnDeviceOf {
 public:
  explicit OnDeviceOf(const at::Tensor& tensor)
      : guard_(tensor.device()), stream_(current_stream(tensor.device()).native_handle()) {}
  void* stream() const { return stream_; }

 private:
  const c10::DeviceGuard guard_;
  void* const stream_;
};

}  // namespace fsdp::nn
