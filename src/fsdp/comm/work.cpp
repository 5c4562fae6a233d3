#include "fsdp/comm/work.h"

#include "fsdp/base/device_stream.h"
#include "fsdp/comm/operation_queue.h"

namespace fsdp {

void WorkState::finish(std::optional<c10::Event> event) {
  event_ = std::move(event);
  done_.store(1, std::memory_order_release);
  done_.notify_all();
}

void WorkState::finish_on(const c10::Stream& stream) {
  if (!event_) event_.emplace(stream.device_type());
  event_->record(stream);
  done_.store(1, std::memory_order_release);
  done_.notify_all();
}

void WorkState::reopen() {
  error_ = nullptr;
  done_.store(0, std::memory_order_relaxed);
}

void WorkState::fail(std::exception_ptr error) {
  error_ = std::move(error);
  done_.store(1, std::memory_order_release);
  done_.notify_all();
}

void WorkState::lend_a_hand_until_done() const {
  if (queue_ != nullptr) {
    queue_->help_until_done(*this);
  } else {
    sleep_until_done();
  }
}

void WorkState::wait() {
  if (!done()) lend_a_hand_until_done();
  if (error_) std::rethrow_exception(error_);
}

void Work::wait() const {
  if (state_ == nullptr) return;
  if (after_ != nullptr && !after_->done() && !state_->done()) after_->lend_a_hand_until_done();
  state_->wait();
  if (!state_->event_) return;
  const c10::Stream stream = current_stream(state_->event_->device());
  state_->event_->block(stream);
  state_->in_use_.let_go_if_called_on(stream);
  if (after_ != nullptr) after_->in_use_.let_go_if_called_on(stream);  // has ended before
}

void Work::wait_as_follower() const {
  if (state_ == nullptr) return;
  state_->sleep_until_done();
  if (state_->error_) std::rethrow_exception(state_->error_);
}

const c10::Event* Work::event() const {
  return state_ != nullptr && state_->event_ ? &*state_->event_ : nullptr;
}

}  // namespace fsdp
