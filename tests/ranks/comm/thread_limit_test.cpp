// If the system gives no more threads, the error is a sentence, and no thread waits for those that
// never came. A program of its own, because it stands in for pthread_create().
#include <dlfcn.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <pthread.h>

#include <atomic>
#include <cerrno>
#include <limits>

#include "fsdp/base/error.h"
#include "fsdp/comm/communicator.h"
#include "fsdp/optim/adamw.h"
#include "fsdp/optim/kernels/thread_team.h"
#include "support/run_ranks.h"
#include "support/sharded_training.h"

namespace {
// How many more threads the calling thread may start.
thread_local int64_t num_threads_left = std::numeric_limits<int64_t>::max();
}  // namespace

extern "C" int pthread_create(pthread_t* thread, const pthread_attr_t* attributes,
                              void* (*body)(void*), void* argument) {
  using Create = int (*)(pthread_t*, const pthread_attr_t*, void* (*)(void*), void*);
  static const auto create = reinterpret_cast<Create>(dlsym(RTLD_NEXT, "pthread_create"));
  if (num_threads_left <= 0) return EAGAIN;
  --num_threads_left;
  return create(thread, attributes, body, argument);
}

namespace fsdp::thread_limit_test {
namespace {

using ::testing::AllOf;
using testing::error_of;
using ::testing::HasSubstr;
using testing::run_ranks;

// While it lives the calling thread may start so many threads.
class ThreadLimit {
 public:
  explicit ThreadLimit(int64_t count) { num_threads_left = count; }
  ~ThreadLimit() { num_threads_left = std::numeric_limits<int64_t>::max(); }
  ThreadLimit(const ThreadLimit&) = delete;
  ThreadLimit& operator=(const ThreadLimit&) = delete;
};

auto no_thread_for(const std::string& work) {
  return AllOf(
      HasSubstr("cannot start a thread for " + work + ": Resource temporarily unavailable"),
      HasSubstr("allow more processes (ulimit -u"), HasSubstr("fewer ranks"));
}

TEST(RankThreads, ThatCannotStartEndThoseThatWaitForThem) {
  std::atomic<int> num_told = 0;
  EXPECT_THAT(error_of([&] {
                const ThreadLimit limit(3);
                run_ranks(8, [&](World& world) {
                  // Waits until all eight are there: forever, if nobody told that they never will.
                  const std::string words =
                      error_of([&] { world.communicator().barrier("start").wait(); });
                  if (words.find("rank 3 of 8") != std::string::npos) ++num_told;
                });
              }),
              no_thread_for("rank 3 of 8"));
  EXPECT_EQ(num_told, 3);
}

TEST(Collectives, ThatGetNoThreadFailOnAllRanks) {
  EXPECT_THAT(error_of([] {
                run_ranks(2, [](World& world) {
                  const ThreadLimit limit(world.rank() == 1 ? 0 : 100);
                  world.communicator().barrier("start").wait();
                });
              }),
              no_thread_for("collectives of communicator 'world'"));
}

TEST(Updates, ThatGetNoThreadAreAnError) {
  EXPECT_THAT(error_of([] {
                run_ranks(1, [](World& world) {
                  const Mesh mesh = world.mesh();
                  testing::Chain model = testing::build([] { return testing::Chain(2); });
                  const Sharded sharded = fully_shard(model, mesh);
                  AdamW optimizer(sharded);
                  model(testing::input_for(0, 0)).sum().backward();
                  const ThreadLimit limit(0);
                  optimizer.step();
                });
              }),
              no_thread_for("the optimizer's updates"));
}

TEST(ThreadTeams, GoOnWhenThereAreThreadsAgain) {
  ThreadTeam team(4);
  std::atomic<int64_t> sum = 0;
  const auto add = [&](int64_t i) { sum += i; };
  EXPECT_THAT(error_of([&] {
                const ThreadLimit limit(1);
                team.run(10, add);
              }),
              no_thread_for("the optimizer's arithmetic"));
  EXPECT_EQ(sum, 0);
  team.run(10, add);
  EXPECT_EQ(sum, 45);
}

}  // namespace
}  // namespace fsdp::thread_limit_test
