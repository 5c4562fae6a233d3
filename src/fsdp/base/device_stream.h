// Streams of a device: the one that work is enqueued on now, and the order between two of them.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>

namespace fsdp {

// Kernels of ours take its native_handle().
c10::Stream current_stream(c10::Device device);

// What is enqueued on `second` from now on comes after all that is enqueued on `first`.
void follow(const c10::Stream& second, const c10::Stream& first);

// Memory that libtorch gave out on one stream is about to be used on another: it may be let go
// before that has happened.
void used_on(const c10::Stream& stream, const at::Tensor& tensor);

}  // namespace fsdp
