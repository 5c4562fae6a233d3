#include "fsdp/base/device_stream.h"

#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>

namespace fsdp {

c10::Stream current_stream(c10::Device device) {
  return c10::impl::VirtualGuardImpl(device.type()).getStream(device);
}

void follow(const c10::Stream& second, const c10::Stream& first) {
  c10::Event queued(first.device_type());
  queued.record(first);
  queued.block(second);
}

void used_on(const c10::Stream& stream, const at::Tensor& tensor) {
  c10::impl::VirtualGuardImpl(stream.device_type())
      .recordDataPtrOnStream(tensor.storage().data_ptr(), stream);
}

}  // namespace fsdp
