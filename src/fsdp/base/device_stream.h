// The stream that a kernel of ours is enqueued on.
#pragma once

#include <c10/core/Device.h>

namespace fsdp {

// What device kernels take as their stream: the current one of a device.
void* current_stream(c10::Device device);

}  // namespace fsdp
