// Decides where the kernels of layer_kernels.h are used, and prepares their calls.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/DeviceGuard.h>

#include "fsdp/base/device_stream.h"
#include "fsdp/base/torch_dtype.h"
#include "fsdp/nn/kernels/layer_kernels.h"

namespace fsdp::nn {

// Whether our kernels can compute there, and with this tensor. Environment: FSDP_LAYERS=kernels
// (default) or aten, for comparisons.
bool has_kernels_on(const at::Device& device);
bool has_kernels(const at::Tensor& tensor);

// Whether its first number is at a multiple of 16 bytes.
bool begins_a_pack(const at::Tensor& tensor);

// The tensor, or a copy, that is dense and begins at a multiple of 16 bytes.
at::Tensor dense_packs(const at::Tensor& tensor);

// Makes the tensor's device the current one while it lives.
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
