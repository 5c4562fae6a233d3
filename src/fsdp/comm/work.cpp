#include "fsdp/comm/work.h"

#include <c10/core/impl/VirtualGuardImpl.h>

#include "fsdp/comm/operation_queue.h"

namespace fsdp {

void WorkState::finish(std::optional<c10::Event> event) {
  event_ = std::move(event);
  done_.store(1, std::memory_order_release);
  done_.notify_all();
}

void WorkState::fail(std::exception_ptr error) {
  error_ = std::move(error);
  done_.store(1, std::memory_order_release);
  done_.notify_all();
}

void WorkState::wait() {
  if (!done()) queue_->help_until_done(*this);
  if (error_) std::rethrow_exception(error_);
}

void Work::wait() const {
  if (state_ == nullptr) return;
  state_->wait();
  if (state_->event_) {
    const c10::Device device = state_->event_->device();
    state_->event_->block(c10::impl::VirtualGuardImpl(device.type()).getStream(device));
  }
}

}  // namespace fsdp
