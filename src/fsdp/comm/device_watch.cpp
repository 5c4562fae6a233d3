#include "fsdp/comm/device_watch.h"

#include <utility>

#include "fsdp/base/log.h"
#include "fsdp/base/text.h"

namespace fsdp {

namespace {

using Clock = std::chrono::steady_clock;
constexpr std::chrono::milliseconds kBetweenLooks{100};
constexpr std::chrono::milliseconds kBetweenLooksAtTheEnd{1};

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
  return std::get<Fingerprint>(what).text();
}

void DeviceWatch::add(const Fingerprint& operation, StreamMark end) {
  push({operation, std::move(end), Clock::now()});
}

void DeviceWatch::add(std::string what, StreamMark end) {
  push({std::move(what), std::move(end), Clock::now()});
}

void DeviceWatch::push(Entry entry) {
  const std::lock_guard lock(mutex_);
  forget_what_has_ended();  // the thread looks too seldom for a stream of small operations
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
  while (!entries_.empty() && entries_.front().end.is_reached()) entries_.pop_front();
}

std::string DeviceWatch::look() {
  if (const std::string words = trouble(); !words.empty()) return words + under_way();
  const std::lock_guard lock(mutex_);
  forget_what_has_ended();
  if (entries_.empty()) return "";
  const Entry& oldest = entries_.front();
  if (Clock::now() - oldest.since < std::chrono::duration<double>(timeout_seconds_)) return "";
  return concat("not ended within ", timeout_seconds_, " s: ", oldest.text(),
                "; a rank is gone or stuck, or computes longer than that");
}

std::string DeviceWatch::under_way() {
  const std::lock_guard lock(mutex_);
  forget_what_has_ended();
  return entries_.empty() ? "" : concat("; under way was ", entries_.front().text());
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
