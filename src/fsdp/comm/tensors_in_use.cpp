#include "fsdp/comm/tensors_in_use.h"

#include <utility>

#include "fsdp/base/device_stream.h"
#include "fsdp/base/error.h"
#include "fsdp/base/log.h"
#include "fsdp/comm/operation.h"

namespace fsdp {

void TensorsInUse::keep(std::shared_ptr<Operation> operation) {
  FSDP_ASSERT(operation->on_device != nullptr && operation->on_device->runs_on);
  operation->after = {};  // or each operation of a chain would keep all before it
  operation_ = std::move(operation);
  keeps_.store(true, std::memory_order_release);
}

void TensorsInUse::let_go_if_called_on(const c10::Stream& stream) {
  if (!keeps_.exchange(false, std::memory_order_acquire)) return;
  if (operation_->on_device->called_on == stream) {
    operation_.reset();
  } else {
    keeps_.store(true, std::memory_order_release);
  }
}

void TensorsInUse::leave_to_allocator() noexcept {
  if (!keeps_.load(std::memory_order_acquire)) return;
  const Operation& operation = *operation_;
  try {
    for (const at::Tensor* tensor : {&operation.output, &operation.input,
                                     &operation.reduction.nonfinite, &operation.reduction.squares})
      if (tensor->defined()) used_on(*operation.on_device->runs_on, *tensor);
  } catch (const std::exception& error) {
    log(LogLevel::kError, "memory of ", operation.print.text(),
        " may be given to others before it has ended: ", error.what());
  }
  operation_.reset();
  keeps_.store(false, std::memory_order_relaxed);
}

}  // namespace fsdp
