#include "fsdp/comm/work_state.h"

#include <utility>

#include "fsdp/base/check.h"
#include "fsdp/base/device_stream.h"
#include "fsdp/base/log.h"
#include "fsdp/comm/operation.h"
#include "fsdp/comm/operation_queue.h"

namespace fsdp {

void WorkState::complete(std::optional<c10::Event> event) {
  event_ = std::move(event);
  done_.store(1, std::memory_order_release);
  done_.notify_all();
}

void WorkState::complete_on(const c10::Stream& stream) {
  if (!event_) event_.emplace(stream.device_type());
  event_->record(stream);
  done_.store(1, std::memory_order_release);
  done_.notify_all();
}

void WorkState::reset() {
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

bool Work::done() const { return state_ == nullptr || state_->done(); }

void Work::wait() const {
  if (state_ == nullptr) return;
  if (after_ != nullptr && !after_->done() && !state_->done()) after_->lend_a_hand_until_done();
  state_->wait();
  if (!state_->event_) return;
  const c10::Stream stream = current_stream(state_->event_->device());
  state_->event_->block(stream);
  state_->in_use_.release_if_called_on(stream);
  if (after_ != nullptr) after_->in_use_.release_if_called_on(stream);  // has ended before
}

void Work::wait_as_follower() const {
  if (state_ == nullptr) return;
  state_->sleep_until_done();
  if (state_->error_) std::rethrow_exception(state_->error_);
}

const c10::Event* Work::event() const {
  return state_ != nullptr && state_->event_ ? &*state_->event_ : nullptr;
}

void TensorsInUse::keep(std::shared_ptr<Operation> operation) {
  FSDP_ASSERT(operation->on_device != nullptr && operation->on_device->runs_on);
  operation->after = {};  // or each operation of a chain would keep all before it
  operation_ = std::move(operation);
  keeps_.store(true, std::memory_order_release);
}

void TensorsInUse::release_if_called_on(const c10::Stream& stream) {
  if (!keeps_.exchange(false, std::memory_order_acquire)) return;
  if (operation_->on_device->called_on == stream) {
    operation_.reset();
  } else {
    keeps_.store(true, std::memory_order_release);
  }
}

void TensorsInUse::release_to_allocator() noexcept {
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

std::shared_ptr<WorkState> WorkPool::take() {
  std::unique_ptr<WorkState> state;
  {
    const std::lock_guard lock(spares_->mutex);
    if (!spares_->states.empty()) {
      state = std::move(spares_->states.back());
      spares_->states.pop_back();
    }
  }
  if (!state) state = std::make_unique<WorkState>();
  state->reset();
  return {state.release(), [spares = spares_](WorkState* unused) {
            std::unique_ptr<WorkState> owned(unused);
            owned->release();
            const std::lock_guard lock(spares->mutex);
            spares->states.push_back(std::move(owned));
          }};
}

}  // namespace fsdp
