#include "fsdp/optim/kernels/thread_team.h"

#include <algorithm>

#include "fsdp/base/start_thread.h"

namespace fsdp {

ThreadTeam::ThreadTeam(int64_t size) : size_(std::max<int64_t>(1, size)) {}

ThreadTeam::~ThreadTeam() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  changed_.notify_all();
  for (std::thread& thread : threads_) thread.join();
}

void ThreadTeam::run(int64_t count, const std::function<void(int64_t)>& part) {
  if (count <= 1 || size_ == 1) {
    for (int64_t i = 0; i < count; ++i) part(i);
    return;
  }
  while (static_cast<int64_t>(threads_.size()) < size_ - 1)
    threads_.push_back(start_thread("the optimizer's arithmetic", [this] { work(); }));
  {
    const std::lock_guard lock(mutex_);
    part_ = &part;
    count_ = count;
    next_ = 0;
    num_working_ = size_ - 1;
    ++round_;
  }
  changed_.notify_all();
  take_parts();
  // No thread may still be about to take a part when the next round begins.
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [this] { return num_working_ == 0; });
}

void ThreadTeam::take_parts() {
  for (int64_t i = next_++; i < count_; i = next_++) (*part_)(i);
}

void ThreadTeam::work() {
  uint64_t done = 0;
  std::unique_lock lock(mutex_);
  while (true) {
    changed_.wait(lock, [&] { return stopping_ || round_ != done; });
    if (stopping_) return;
    done = round_;
    lock.unlock();
    take_parts();
    lock.lock();
    if (--num_working_ == 0) changed_.notify_all();
  }
}

}  // namespace fsdp
