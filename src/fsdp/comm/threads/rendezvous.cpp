#include "fsdp/comm/threads/rendezvous.h"

#include <algorithm>
#include <chrono>
#include <thread>
#include <utility>

#include "fsdp/base/check.h"
#include "fsdp/comm/comm_error.h"

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

}  // namespace fsdp
