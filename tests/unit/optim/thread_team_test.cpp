// Threads that share work: every part is done once, by the time run() returns.
#include "fsdp/optim/kernels/thread_team.h"

#include <gtest/gtest.h>

#include <set>
#include <vector>

namespace fsdp::thread_team_test {
namespace {

TEST(ThreadTeam, DoesEveryPartOnce) {
  for (const int64_t size : {1, 2, 5}) {
    ThreadTeam team(size);
    for (int round = 0; round < 200; ++round) {
      std::vector<std::atomic<int>> done(static_cast<size_t>(round % 7));
      team.run(round % 7, [&](int64_t i) { ++done[static_cast<size_t>(i)]; });
      for (const auto& each : done) ASSERT_EQ(each, 1);
    }
  }
}

TEST(ThreadTeam, WorksOnSeveralThreads) {
  ThreadTeam team(3);
  std::mutex mutex;
  std::set<std::thread::id> seen;
  std::atomic<int> inside = 0;
  team.run(3, [&](int64_t) {
    ++inside;
    while (inside < 3) std::this_thread::yield();  // until all three are inside at once
    const std::lock_guard lock(mutex);
    seen.insert(std::this_thread::get_id());
  });
  EXPECT_EQ(seen.size(), 3u);
}

TEST(ThreadTeam, IsTheCallerAloneWithOneThread) {
  ThreadTeam team(0);
  EXPECT_EQ(team.size(), 1);
  team.run(2, [caller = std::this_thread::get_id()](int64_t) {
    EXPECT_EQ(std::this_thread::get_id(), caller);
  });
}

}  // namespace
}  // namespace fsdp::thread_team_test
