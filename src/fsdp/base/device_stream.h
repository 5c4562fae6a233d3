// Streams of a device: the one that work is enqueued on now, and the order between two of them.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>

namespace fsdp {

// Kernels of ours take its native_handle().
c10::Stream current_stream(c10::Device device);

// Makes `second` wait: work that is enqueued there from now on comes after all work that is
// enqueued on `first`.
void follow(const c10::Stream& second, const c10::Stream& first);

// Tells libtorch's allocator that `stream` uses the tensor's memory, so that the tensor may be
// released before that use has ended.
void used_on(const c10::Stream& stream, const at::Tensor& tensor);

}  // namespace fsdp
