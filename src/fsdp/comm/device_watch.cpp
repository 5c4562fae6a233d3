#include "fsdp/comm/device_watch.h"

#include <utility>

#include "fsdp/base/log.h"
#include "fsdp/base/text.h"

namespace fsdp {

namespace {

using Clock = std::chrono::steady_clock;
constexpr std::chrono::milliseconds kBetweenLooks{100};
constexpr std::chrono::milliseconds kBetweenLooksAtTheEnd{1};

// Whoever adds cleans up, as the thread looks too seldom for a stream of small operations. Half of
// this many at a time: asking the device costs more than remembering.
constexpr size_t kMany = 16;

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

std::string DeviceWatch::Entry::text() const {
  if (const auto* name = std::get_if<std::string>(&what)) return *name;
  return std::get<Operation>(what).print.text();
}

void DeviceWatch::add(Operation operation, Work work) {
  push({std::move(operation), std::move(work), Clock::now()});
}

void DeviceWatch::add(std::string what, Work work) {
  push({std::move(what), std::move(work), Clock::now()});
}

void DeviceWatch::push(Entry entry) {
  const std::lock_guard lock(mutex_);
  // They end in order: if that one has, so have those before it.
  if (entries_.size() >= kMany && entries_[kMany / 2].has_ended())
    entries_.erase(entries_.begin(), entries_.begin() + kMany / 2 + 1);
  entries_.push_back(std::move(entry));
  if (!thread_.joinable())
    thread_ = std::thread([this, rank = thread_rank()] {
      set_thread_rank(rank);
      watch();
    });
}

void DeviceWatch::wait_for_the_end() {
  std::unique_lock lock(mutex_);
  while (true) {
    forget_what_has_ended();
    if (entries_.empty() || has_reported_) return;
    changed_.wait_for(lock, kBetweenLooksAtTheEnd);
  }
}

void DeviceWatch::forget_what_has_ended() {
  while (!entries_.empty() && entries_.front().has_ended()) entries_.pop_front();
}

std::string DeviceWatch::look() {
  std::string words = trouble();
  const std::lock_guard lock(mutex_);
  forget_what_has_ended();
  if (entries_.empty()) return words;
  const Entry& oldest = entries_.front();
  if (!words.empty()) return concat(words, "; under way was ", oldest.text());
  if (Clock::now() - oldest.since < std::chrono::duration<double>(timeout_seconds_)) return "";
  return concat("not ended within ", timeout_seconds_, " s: ", oldest.text(),
                "; a rank is gone or stuck, or computes longer than that");
}

std::string DeviceWatch::trouble() const {
  try {
    return callbacks_.trouble();
  } catch (const std::exception& error) {
    return error.what();
  }
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
    if (!words.empty()) callbacks_.on_fail(words);
    lock.lock();
    if (words.empty()) continue;
    has_reported_ = true;
    return;
  }
}

}  // namespace fsdp
