#include "fsdp/base/device_stream.h"

#include <c10/core/impl/VirtualGuardImpl.h>

namespace fsdp {

void* current_stream(c10::Device device) {
  const c10::impl::VirtualGuardImpl guard(device.type());
  return guard.getStream(device).native_handle();
}

}  // namespace fsdp
