// Two runs on one directory: the second one is told of the first, and a dead one is no obstacle.
#include "fsdp/checkpoint/run_directory.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>

#include "fsdp/base/check.h"
#include "fsdp/base/text.h"
#include "support/temp_dir.h"

namespace fsdp::run_lock_test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::ThrowsMessage;

class RunLockTest : public ::testing::Test {
 protected:
  void expect_refusal(pid_t holder) const {
    EXPECT_THAT([&] { RunLock lock(dir_.path()); },
                ThrowsMessage<Error>(AllOf(HasSubstr(dir_.path() + ": another run saves"),
                                           HasSubstr(concat("(process ", holder, " on ")),
                                           HasSubstr("--checkpoint-dir"))));
  }

  // A program of its own that lives until the end of the test.
  pid_t start(const std::function<void()>& body) {
    EXPECT_EQ(::pipe(pipe_), 0);
    const pid_t child = ::fork();
    if (child == 0) {
      body();
      ::_exit(1);
    }
    char ready = 0;
    EXPECT_EQ(::read(pipe_[0], &ready, 1), 1);
    return child;
  }
  void tell_ready() const { static_cast<void>(::write(pipe_[1], "x", 1) == 1); }

  static void kill(pid_t child) {
    ::kill(child, SIGKILL);
    ::waitpid(child, nullptr, 0);
  }

  testing::TempDir dir_;
  int pipe_[2] = {-1, -1};
};

TEST_F(RunLockTest, IsHeldByOneAtATime) {
  {
    const RunLock lock(dir_.path());
    expect_refusal(::getpid());
  }
  EXPECT_THAT(names_in(dir_.path()), IsEmpty());
  const RunLock again(dir_.path());
}

TEST_F(RunLockTest, IsTakenAgainIfItsFileWasRemoved) {
  RunLock lock(dir_.path());
  lock.confirm();
  std::filesystem::remove(dir_ / "lock");
  ::testing::internal::CaptureStderr();
  lock.confirm();
  EXPECT_THAT(::testing::internal::GetCapturedStderr(),
              HasSubstr("lock: was removed while this run holds it"));
  expect_refusal(::getpid());
}

TEST_F(RunLockTest, ThatAnotherRunHasTakenEndsSaving) {
  RunLock lock(dir_.path());
  std::filesystem::remove(dir_ / "lock");
  const RunLock thief(dir_.path());
  ::testing::internal::CaptureStderr();
  EXPECT_THAT([&] { lock.confirm(); },
              ThrowsMessage<Error>(HasSubstr("another run saves its checkpoints here")));
  static_cast<void>(::testing::internal::GetCapturedStderr());
}

TEST_F(RunLockTest, OfAKilledProcessIsFree) {
  const pid_t child = start([&] {
    const RunLock lock(dir_.path());
    tell_ready();
    for (;;) ::pause();
  });
  expect_refusal(child);
  kill(child);
  ::testing::internal::CaptureStderr();
  const RunLock lock(dir_.path());
  EXPECT_EQ(::testing::internal::GetCapturedStderr(), "");
}

TEST_F(RunLockTest, IsNotInheritedByProgramsThatARunStarts) {
  pid_t child = 0;
  {
    const RunLock lock(dir_.path());
    child = start([&] {
      const std::string line = concat("echo x >&", pipe_[1], "; exec sleep 1000");
      ::execl("/bin/sh", "sh", "-c", line.c_str(), nullptr);
    });
  }
  EXPECT_NO_THROW(RunLock lock(dir_.path()));
  kill(child);
}

// Its lock may be one that only its host sees.
TEST_F(RunLockTest, OfARunOnAnotherHostThatDidNotEndIsToldOf) {
  std::ofstream(dir_ / "lock") << "process 7 on elsewhere\n";
  ::testing::internal::CaptureStderr();
  const RunLock lock(dir_.path());
  EXPECT_THAT(::testing::internal::GetCapturedStderr(),
              AllOf(HasSubstr("(process 7 on elsewhere) did not end by itself")));
}

TEST_F(RunLockTest, NeedsADirectoryThatCanBeWritten) {
  EXPECT_THAT([&] { RunLock lock(dir_ / "nothing"); },
              ThrowsMessage<Error>(HasSubstr("nothing/lock: cannot open the file: No such file")));
}

}  // namespace
}  // namespace fsdp::run_lock_test
