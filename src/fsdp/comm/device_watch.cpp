#include "fsdp/comm/device_watch.h"

#include <utility>

#include "fsdp/base/log.h"
#include "fsdp/base/text.h"

namespace fsdp {

namespace {

using Clock = std::chrono::steady_clock;
constexpr std::chrono::milliseconds kBetweenLooks{100};

}  // namespace

DeviceWatch::DeviceWatch(double timeout_seconds, Callbacks callbacks)
    : timeout_seconds_(timeout_seconds), callbacks_(std::move(callbacks)) {}

DeviceWatch::~DeviceWatch() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  changed_.notify_all();
  if (thread_.joinable()) thread_.join();
}

void DeviceWatch::add(std::shared_ptr<Operation> operation, std::shared_ptr<c10::Event> finished) {
  const std::lock_guard lock(mutex_);
  // Whoever adds, cleans up: the thread looks too seldom for a stream of small operations.
  while (!entries_.empty() && entries_.front().finished->query()) entries_.pop_front();
  entries_.push_back({std::move(operation), std::move(finished), Clock::now()});
  if (!thread_.joinable())
    thread_ = std::thread([this, rank = thread_rank()] {
      set_thread_rank(rank);
      watch();
    });
}

std::string DeviceWatch::look() {
  {
    const std::lock_guard lock(mutex_);
    while (!entries_.empty() && entries_.front().finished->query()) entries_.pop_front();
  }
  if (std::string words = callbacks_.trouble(); !words.empty()) return words;
  const std::lock_guard lock(mutex_);
  if (entries_.empty()) return "";
  const Entry& oldest = entries_.front();
  if (Clock::now() - oldest.since < std::chrono::duration<double>(timeout_seconds_)) return "";
  return concat("not ended within ", timeout_seconds_, " s: ", oldest.operation->print.text(),
                "; a rank is gone or stuck, or computes longer than that");
}

void DeviceWatch::watch() {
  std::unique_lock lock(mutex_);
  while (!changed_.wait_for(lock, kBetweenLooks, [this] { return stopping_; })) {
    lock.unlock();
    std::string words;
    try {
      words = look();
    } catch (const std::exception& error) {
      words = error.what();
    }
    if (!words.empty()) {
      callbacks_.on_fail(words);
      return;
    }
    lock.lock();
  }
}

}  // namespace fsdp
