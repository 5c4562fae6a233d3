#include "fsdp/comm/enqueued_operation.h"

#include <ATen/ATen.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <array>
#include <utility>

#include "fsdp/base/check.h"
#include "fsdp/base/device_stream.h"
#include "fsdp/base/integer.h"
#include "fsdp/base/log.h"
#include "fsdp/comm/operation_queue.h"

namespace fsdp {

namespace {

// A fingerprint from another rank may hold any byte.
template <typename Kind, size_t kCount>
const char* name_in(const std::array<const char*, kCount>& names, Kind kind) {
  const auto index = static_cast<size_t>(kind);
  return index < kCount ? names[index] : "unknown";
}

}  // namespace

const char* name_of(OpKind kind) {
  constexpr std::array kNames = {"all_gather", "reduce_scatter", "all_reduce", "all_to_all",
                                 "broadcast",  "barrier",        "copy"};
  return name_in(kNames, kind);
}

const char* name_of(ReduceOp op) {
  constexpr std::array kNames = {"sum", "avg", "max", "min"};
  return name_in(kNames, op);
}

const char* name_of(Store store) {
  constexpr std::array kNames = {"write", "add"};
  return name_in(kNames, store);
}

Tag::Tag(std::string_view text) {
  std::copy_n(text.begin(), std::min(text.size(), kMaxLength), text_.begin());
}

std::string Fingerprint::text() const {
  std::string words = concat("operation ", sequence, ": ", name_of(kind));
  const bool reduces = kind == OpKind::kReduceScatter || kind == OpKind::kAllReduce;
  if (reduces) words += concat(" (", name_of(reduce), ")");
  if (!tag.text().empty()) words += concat(" '", tag.text(), "'");
  if (kind == OpKind::kBarrier) return words;
  if (bytes >= 0) words += concat(" of ", bytes, " bytes");
  words += concat(" of ", c10::toString(wire));
  if (device != at::kCPU) words += concat(" on ", c10::DeviceTypeName(device, /*lower_case=*/true));
  if (reduces && result != wire) words += concat(" into ", c10::toString(result));
  if (reduces && store != Store::kWrite) words += concat(", stored by ", name_of(store));
  if (reduces && scale != 1.0) words += concat(" scaled by ", scale);
  if (kind == OpKind::kBroadcast) words += concat(" from rank ", root);
  return words;
}

Shares Shares::equal(int64_t numel_per_rank, int ranks) {
  Shares shares;
  shares.ranks_ = ranks;
  shares.equal_count_ = numel_per_rank;
  return shares;
}

Shares Shares::uneven(std::span<const int64_t> counts) {
  Shares shares;
  shares.ranks_ = static_cast<int>(counts.size());
  int64_t end = 0;
  for (size_t rank = 0; rank < counts.size(); ++rank) {
    FSDP_CHECK(counts[rank] >= 0, "counts[", rank, "] is ", counts[rank],
               ": a rank's number of elements must be 0 or more");
    end = checked_add(end, counts[rank]);
    shares.ends_.push_back(end);
  }
  return shares;
}

Shares Shares::cut(int64_t numel, int ranks, int64_t multiple) {
  const int64_t piece = round_up(ceil_div(numel, ranks), multiple);
  if (piece * ranks == numel) return equal(piece, ranks);
  Shares shares;
  shares.ranks_ = ranks;
  for (int rank = 0; rank < ranks; ++rank)
    shares.ends_.push_back(std::min(numel, piece * (rank + 1)));
  return shares;
}

int64_t Shares::offset(int rank) const { return rank == 0 ? 0 : end(rank - 1); }

int64_t Shares::end(int rank) const {
  return is_equal() ? equal_count_ * (rank + 1) : ends_[static_cast<size_t>(rank)];
}

int64_t Shares::largest() const {
  int64_t largest = equal_count_;
  for (int rank = 0; rank < ranks_; ++rank) largest = std::max(largest, count(rank));
  return largest;
}

void WorkState::finish() {
  // Sequentially consistent: libstdc++ skips the wake-up when it counts no sleeper, and after a
  // weaker store x86 may have read that count before a new sleeper can see the store.
  done_.store(1, std::memory_order_seq_cst);
  done_.notify_all();
}

void WorkState::complete(std::optional<c10::Event> event) {
  event_ = std::move(event);
  finish();
}

void WorkState::complete_on(const c10::Stream& stream) {
  if (!event_) event_.emplace(stream.device_type());
  event_->record(stream);
  finish();
}

void WorkState::reset() {
  error_ = nullptr;
  done_.store(0, std::memory_order_relaxed);
}

void WorkState::fail(std::exception_ptr error) {
  error_ = std::move(error);
  finish();
}

void WorkState::help_run_until_done() const {
  if (queue_ != nullptr) {
    queue_->help_until_done(*this);
  } else {
    sleep_until_done();
  }
}

void WorkState::wait() {
  if (!done()) help_run_until_done();
  if (error_) std::rethrow_exception(error_);
}

bool Work::done() const { return state_ == nullptr || state_->done(); }

void Work::wait() const {
  if (state_ == nullptr) return;
  if (after_ != nullptr && !after_->done() && !state_->done()) after_->help_run_until_done();
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

c10::Stream DeviceSide::stream_on(c10::Device device) {
  if (!stream) stream = c10::impl::VirtualGuardImpl(device.type()).getNewStream(device);
  return *stream;
}

void follow_on_device(Operation& operation, DeviceSide& side) {
  const c10::Event* ended = operation.after.event();
  // Other ranks read what a copy wrote on this rank's stream, and wait for `ready` alone.
  const bool follows_copy = std::exchange(side.has_copied, false);
  if (ended == nullptr && !follows_copy) return;
  const c10::Stream stream = side.stream_on(operation.device());
  operation.on_device->ready.block(stream);
  if (ended != nullptr) ended->block(stream);
  operation.on_device->ready.record(stream);  // nobody has seen it yet: the ranks have not met
}

std::optional<c10::Event> run_copy(Operation& operation, DeviceSide& side) {
  const at::Tensor output = operation.output.view(-1);
  const at::Tensor input = operation.input.view(-1);
  const c10::Device device = operation.device();
  if (device.is_cpu()) {
    output.copy_(input);
    return std::nullopt;
  }
  const c10::Stream stream = side.stream_on(device);
  operation.on_device->runs_on = stream;
  const c10::StreamGuard guard(stream);
  follow_on_device(operation, side);
  operation.on_device->ready.block(stream);
  if (output.numel() > 0) output.copy_(input, /*non_blocking=*/true);
  side.has_copied = true;
  c10::Event finished(device.type());
  finished.record(stream);
  return finished;
}

}  // namespace fsdp
