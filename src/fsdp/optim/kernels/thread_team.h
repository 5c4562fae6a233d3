// A few threads that update parts of one span together.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace fsdp {

// libtorch's parallel_for runs serially in code compiled without its OpenMP, and a second OpenMP's
// threads would compete with its own; hence our own team. For one caller at a time.
class ThreadTeam {
 public:
  // `size` includes the caller, which takes part. Threads start with their first work.
  explicit ThreadTeam(int64_t size);
  ~ThreadTeam();
  ThreadTeam(const ThreadTeam&) = delete;
  ThreadTeam& operator=(const ThreadTeam&) = delete;

  int64_t size() const { return size_; }

  // Calls part(i) for i in [0, count), on several threads; returns when all are done. Parts must
  // not throw.
  void run(int64_t count, const std::function<void(int64_t)>& part);

 private:
  void work();
  void take_parts();

  const int64_t size_;
  std::vector<std::thread> threads_;
  std::mutex mutex_;  // protects the members below, but for next_
  std::condition_variable changed_;
  const std::function<void(int64_t)>* part_ = nullptr;
  int64_t count_ = 0;
  uint64_t round_ = 0;  // of work
  int64_t num_working_ = 0;
  bool stopping_ = false;
  std::atomic<int64_t> next_{0};
};

}  // namespace fsdp
