#include "fsdp/comm/threads/threads_communicator.h"

#include <ATen/ATen.h>
#include <c10/core/StreamGuard.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <thread>
#include <utility>
#include <vector>

#include "fsdp/base/check.h"
#include "fsdp/base/log.h"
#include "fsdp/base/text.h"
#include "fsdp/comm/comm_error.h"
#include "fsdp/comm/reduce/reduce_ranks.h"

namespace fsdp {

namespace {

// Ranks usually arrive within microseconds of each other; sleeping and being woken costs tens. But
// spinning only helps while every rank has a core to arrive on.
int spins_for(int ranks) {
  const auto cores = static_cast<int>(std::thread::hardware_concurrency());
  return ranks <= cores ? 4000 : 0;
}

inline void pause_briefly() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("isb" ::: "memory");
#endif
}

class Sleeper {
 public:
  explicit Sleeper(std::atomic<int>& count) : count_(count) { count_.fetch_add(1); }
  ~Sleeper() { count_.fetch_sub(1); }
  Sleeper(const Sleeper&) = delete;
  Sleeper& operator=(const Sleeper&) = delete;

 private:
  std::atomic<int>& count_;
};

// Each rank must send to each what that one expects; the counts are not in the
// fingerprint, as they differ from rank to rank. Every rank checks every pair, so that all fail
// together. Returns the error's words, or "".
std::string mismatching_counts(Rendezvous& rendezvous) {
  for (int from = 0; from < rendezvous.ranks(); ++from) {
    for (int to = 0; to < rendezvous.ranks(); ++to) {
      const int64_t sent = rendezvous.of(from).input_shares.count(to);
      const int64_t expected = rendezvous.of(to).output_shares.count(from);
      if (sent != expected)
        return concat("ranks of '", rendezvous.name(), "' disagree at ",
                      rendezvous.of(from).print.text(), ": rank ", from, " sends ", sent,
                      " elements to rank ", to, ", which expects ", expected);
    }
  }
  return "";
}

// Elements of one rank's flat tensor.
struct Part {
  const at::Tensor& tensor;
  int64_t offset;
  int64_t numel;

  static Part all_of(const at::Tensor& tensor) { return {tensor, 0, tensor.numel()}; }
  static Part share_of(const at::Tensor& tensor, const Shares& shares, int rank) {
    return {tensor, shares.offset(rank), shares.count(rank)};
  }

  const char* begin() const {
    return static_cast<const char*>(tensor.const_data_ptr()) + offset * tensor.element_size();
  }
  at::Tensor view() const { return tensor.view(-1).narrow(0, offset, numel); }
};

void copy_on_host(const Part& to, const Part& from) {
  char* place = at_element(to.tensor, to.offset);
  if (place != from.begin() && to.numel > 0)
    std::memcpy(place, from.begin(), static_cast<size_t>(to.numel * to.tensor.element_size()));
}

void copy_on_device(const Part& to, const Part& from) {
  if (to.numel > 0 && to.begin() != from.begin())
    to.view().copy_(from.view(), /*non_blocking=*/true);
}

// Calls body for every rank, from this one on: two ranks never read the same memory at the same
// time.
template <typename Body>
void for_ranks_from(int rank, int ranks, const Body& body) {
  for (int step = 0; step < ranks; ++step) body((rank + step) % ranks);
}

// This rank's part of an operation that has been met: copy(to, from) moves the elements, and
// reduce(inputs, output) combines a part of every rank's input. Of an all-reduce the first half: r
// alone reads share r, so it may write that in place before the others have finished theirs.
template <typename Copy, typename Reduce>
void move_parts(Rendezvous& ranks, int rank, const Operation& operation, const Copy& copy,
                const Reduce& reduce) {
  const Shares& shares = operation.output_shares;
  const auto reduce_to = [&](const Part& output) {
    std::vector<Part> inputs;
    for (int from = 0; from < ranks.ranks(); ++from)
      inputs.push_back(Part::share_of(ranks.of(from).input, operation.input_shares, rank));
    reduce(inputs, output);
  };
  switch (operation.print.kind) {
    case OpKind::kAllGather:
      return for_ranks_from(rank, ranks.ranks(), [&](int from) {
        copy(Part::share_of(operation.output, shares, from), Part::all_of(ranks.of(from).input));
      });
    case OpKind::kReduceScatter:
      return reduce_to(Part::all_of(operation.output));
    case OpKind::kAllReduce:
      return reduce_to(Part::share_of(operation.output, shares, rank));
    case OpKind::kAllToAll:
      return for_ranks_from(rank, ranks.ranks(), [&](int from) {
        const Operation& theirs = ranks.of(from);
        copy(Part::share_of(operation.output, shares, from),
             Part::share_of(theirs.input, theirs.input_shares, rank));
      });
    case OpKind::kBroadcast:
      return copy(Part::all_of(operation.output),
                  Part::all_of(ranks.of(operation.print.root).input));
    case OpKind::kBarrier:
    case OpKind::kCopy:
      return;
  }
}

// The second half of an all-reduce: everybody collects the shares that the others have finished.
template <typename Copy>
void collect_shares(Rendezvous& ranks, int rank, const Operation& operation, const Copy& copy) {
  const Shares& shares = operation.output_shares;
  for_ranks_from(rank, ranks.ranks(), [&](int from) {
    copy(Part::share_of(operation.output, shares, from),
         Part::share_of(ranks.of(from).output, shares, from));
  });
}

}  // namespace

Rendezvous::Rendezvous(std::string name, int ranks, const CommOptions& options,
                       std::shared_ptr<AbortSignal> abort)
    : name_(std::move(name)),
      options_(options),
      spins_(spins_for(ranks)),
      abort_(std::move(abort)),
      seats_(static_cast<size_t>(ranks)) {}

void Rendezvous::meet(int rank, Operation& operation) {
  Seat& seat = seats_[static_cast<size_t>(rank)];
  seat.operation = &operation;
  seat.print = operation.print;
  sync(rank);
  for (int other = 0; other < ranks(); ++other) {
    const Fingerprint& theirs = seats_[static_cast<size_t>(other)].print;
    if (theirs == operation.print) continue;
    // Everybody has met, so everybody finds a difference; nobody needs to be told.
    throw CommError(concat("ranks of '", name_, "' disagree: rank ", rank, " is at ",
                           operation.print.text(), "; rank ", other, " is at ", theirs.text()));
  }
}

void Rendezvous::sync(int rank) {
  Seat& seat = seats_[static_cast<size_t>(rank)];
  const uint64_t progress = seat.progress.load(std::memory_order_relaxed) + 1;
  // Sequentially consistent with sleepers_: either the last to arrive sees a sleeper and wakes it,
  // or the sleeper sees the arrival before it sleeps.
  seat.progress.store(progress, std::memory_order_seq_cst);
  if (sleepers_.load(std::memory_order_seq_cst) > 0) {
    { const std::lock_guard lock(sleep_mutex_); }
    arrived_.notify_all();
  }
  wait_for_all(rank, progress);
}

bool Rendezvous::all_at(uint64_t progress) const {
  return std::all_of(seats_.begin(), seats_.end(), [progress](const Seat& seat) {
    return seat.progress.load(std::memory_order_seq_cst) >= progress;
  });
}

void Rendezvous::wait_for_all(int rank, uint64_t progress) {
  for (int spin = 0; spin < spins_; ++spin) {
    if (all_at(progress)) return;
    pause_briefly();
  }
  const auto deadline =
      std::chrono::steady_clock::now() + std::chrono::duration<double>(options_.timeout_seconds);
  std::unique_lock lock(sleep_mutex_);
  const Sleeper sleeper(sleepers_);
  while (!all_at(progress)) {
    // Short enough to notice an abort raised elsewhere, long enough to cost nothing.
    arrived_.wait_for(lock, std::chrono::milliseconds(10));
    if (all_at(progress)) return;
    abort_->throw_if_raised();
    if (std::chrono::steady_clock::now() >= deadline) throw_late(rank, progress);
  }
}

void Rendezvous::throw_late(int rank, uint64_t progress) {
  std::vector<std::string> missing;
  for (int other = 0; other < ranks(); ++other)
    if (seats_[static_cast<size_t>(other)].progress.load() < progress)
      missing.push_back(std::to_string(other));
  const std::string message =
      concat("rank ", rank, " of '", name_, "' waited ", options_.timeout_seconds, " s at ",
             seats_[static_cast<size_t>(rank)].print.text(), " for rank ", join(missing, ", "),
             missing.size() == 1 ? ", which has not arrived" : ", which have not arrived",
             "; look at what it does instead, or raise ", options_.timeout_name);
  abort_->raise(message);
  throw TimeoutError(message);
}

void Rendezvous::keep(std::shared_ptr<Operation> operation) {
  const std::lock_guard lock(mutex_);
  kept_.push_back(std::move(operation));
}

std::shared_ptr<Rendezvous> Rendezvous::child(uint64_t number, std::span<const int> colors,
                                              int color, size_t members, const std::string& name) {
  const std::lock_guard lock(mutex_);
  const auto key = std::make_pair(number, color);
  auto [found, is_new] = children_.try_emplace(key);
  Child& child = found->second;
  if (is_new) {
    child.colors.assign(colors.begin(), colors.end());
    child.rendezvous =
        std::make_shared<Rendezvous>(name, static_cast<int>(members), options_, abort_);
    child.still_to_come = members;
  }
  FSDP_CHECK(std::equal(colors.begin(), colors.end(), child.colors.begin(), child.colors.end()),
             "ranks of '", name_, "' disagree about colors in split '", name,
             "': every rank must pass the same list");
  std::shared_ptr<Rendezvous> rendezvous = child.rendezvous;
  if (--child.still_to_come == 0) children_.erase(found);
  return rendezvous;
}

ThreadsCommunicator::ThreadsCommunicator(int rank, std::shared_ptr<Rendezvous> rendezvous,
                                         int sum_group)
    : Communicator(rank, rendezvous->ranks(), rendezvous->name(), sum_group),
      rendezvous_(std::move(rendezvous)),
      queue_(rendezvous_->name(), *this, rendezvous_->options()) {}

Work ThreadsCommunicator::enqueue(Operation operation) { return queue_.push(std::move(operation)); }

std::unique_ptr<Communicator> ThreadsCommunicator::split_off(Subgroup part) {
  auto child =
      rendezvous_->child(num_splits_++, part.colors, part.colors[static_cast<size_t>(rank())],
                         part.members.size(), part.name);
  return std::make_unique<ThreadsCommunicator>(part.rank, std::move(child), part.sum_group);
}

void ThreadsCommunicator::abort(const std::string& message) { rendezvous_->abort().raise(message); }

void ThreadsCommunicator::cancel() noexcept {
  rendezvous_->abort().raise_unexplained(
      concat("rank ", rank(), " of '", name(), "' was left by an exception"), thread_rank());
}

std::optional<c10::Event> ThreadsCommunicator::run(const std::shared_ptr<Operation>& operation) {
  rendezvous_->abort().throw_if_raised();
  if (operation->print.kind == OpKind::kCopy) return run_copy(*operation, device_side_);
  try {
    if (!operation->device().is_cpu()) follow_on_device(*operation, device_side_);
    rendezvous_->meet(rank(), *operation);
    operation->moves_since = std::chrono::steady_clock::now();
    return run_met(*operation);
  } catch (const AbortedError&) {
    rendezvous_->keep(operation);
    throw;
  } catch (const std::exception& error) {
    rendezvous_->keep(operation);
    // The others may be waiting for this rank's next step, which will not come.
    abort(concat("rank ", rank(), " of '", name(), "' failed: ", error.what()));
    throw;
  }
}

std::optional<c10::Event> ThreadsCommunicator::run_met(Operation& operation) {
  if (operation.print.kind == OpKind::kAllToAll) {
    const std::string mismatch = mismatching_counts(*rendezvous_);
    rendezvous_->sync(rank());  // until here others read this rank's counts
    if (!mismatch.empty()) throw CommError(mismatch);
  }
  if (!operation.device().is_cpu()) return run_on_device(operation);
  run_on_host(operation);
  rendezvous_->sync(rank());  // until here others read this rank's tensors
  return std::nullopt;
}

size_t ThreadsCommunicator::group() const {
  return static_cast<size_t>(SumOrder::of(size(), sum_group()).group);
}

void ThreadsCommunicator::run_on_host(Operation& operation) {
  const auto reduce = [&](const std::vector<Part>& inputs, const Part& output) {
    std::vector<const void*> addresses;
    for (const Part& input : inputs) addresses.push_back(input.begin());
    reduce_ranks({.inputs = addresses,
                  .output = at_element(output.tensor, output.offset),
                  .numel = output.numel,
                  .types = {operation.print.wire, operation.print.result},
                  .group = group()},
                 operation.reduction);
  };
  move_parts(*rendezvous_, rank(), operation, copy_on_host, reduce);
  if (operation.print.kind != OpKind::kAllReduce) return;
  rendezvous_->sync(rank());
  collect_shares(*rendezvous_, rank(), operation, copy_on_host);
}

// Each rank's stream waits until every input is produced, reads, and records that it has read; then
// waits until everybody has read its own input. The events are shared through the operations, which
// stay in place until the last sync.
c10::Event ThreadsCommunicator::run_on_device(Operation& operation) {
  const c10::Device device = operation.device();
  const c10::Stream stream = device_side_.stream_on(device);
  operation.on_device->runs_on = stream;
  const c10::StreamGuard guard(stream);
  const auto wait_for_everybody = [&] {
    for (int other = 0; other < size(); ++other)
      rendezvous_->of(other).on_device->ready.block(stream);
  };
  // `ready` is re-recorded for each phase: first "input produced" (by the caller's stream), then "I
  // have read". A sync between the last use of one meaning and the first of the next.
  const auto everybody_reaches_here = [&] {
    rendezvous_->sync(rank());
    operation.on_device->ready.record(stream);
    rendezvous_->sync(rank());
    wait_for_everybody();
  };
  const auto reduce = [&](const std::vector<Part>& inputs, const Part& output) {
    std::vector<at::Tensor> views;
    for (const Part& input : inputs) views.push_back(input.view());
    reduce_on_device(views, operation.reduction, output.view(), device_side_.workspace, group());
  };

  wait_for_everybody();
  move_parts(*rendezvous_, rank(), operation, copy_on_device, reduce);
  everybody_reaches_here();
  if (operation.print.kind == OpKind::kAllReduce) {
    collect_shares(*rendezvous_, rank(), operation, copy_on_device);
    everybody_reaches_here();
  }
  c10::Event finished(device.type());
  finished.record(stream);
  rendezvous_->sync(rank());
  return finished;
}

}  // namespace fsdp
