// What a host has left, from the files of Linux, and whether the ranks of a run fit into it.
#include "fsdp/train/machine_memory.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>

#include "support/temp_dir.h"

namespace fsdp::train::machine_memory_test {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

constexpr int64_t kGiB = int64_t{1} << 30;

// A directory that stands in for "/".
class Machine {
 public:
  Machine& with(const std::string& path, const std::string& text) {
    const std::filesystem::path file = root() + path;
    std::filesystem::create_directories(file.parent_path());
    std::ofstream(file) << text;
    return *this;
  }
  std::string root() const { return directory_.path(); }

 private:
  testing::TempDir directory_;
};

constexpr const char* kMemory = "MemTotal:       33554432 kB\nMemAvailable:   16777216 kB\n";

TEST(AvailableMemory, IsWhatTheKernelSays) {
  Machine machine;
  EXPECT_FALSE(available_host_memory(machine.root()));
  machine.with("/proc/meminfo", kMemory).with("/proc/self/cgroup", "0::/\n");
  const auto found = available_host_memory(machine.root());
  ASSERT_TRUE(found);
  EXPECT_EQ(found->bytes, 16 * kGiB);
  EXPECT_THAT(found->source, HasSubstr("MemAvailable"));
}

TEST(AvailableMemory, IsWhatTheTightestGroupLeaves) {
  Machine machine;
  machine.with("/proc/meminfo", kMemory)
      .with("/proc/self/cgroup", "0::/job/step\n")
      .with("/sys/fs/cgroup/job/memory.max", "8589934592\n")
      .with("/sys/fs/cgroup/job/memory.current", "3221225472\n")
      .with("/sys/fs/cgroup/job/memory.stat", "anon 1\ninactive_file 2147483648\nfile 5\n")
      .with("/sys/fs/cgroup/job/step/memory.max", "max\n")
      .with("/sys/fs/cgroup/job/step/memory.current", "3221225472\n");
  const auto found = available_host_memory(machine.root());
  ASSERT_TRUE(found);
  // 8 GiB, of which 3 are used; 2 of those are pages of files.
  EXPECT_EQ(found->bytes, 7 * kGiB);
  EXPECT_EQ(found->source, "the limit of its control group");
}

TEST(AvailableMemory, KnowsTheOlderGroups) {
  Machine machine;
  machine.with("/proc/meminfo", kMemory)
      .with("/proc/self/cgroup", "5:cpu:/\n4:memory:/gone/outside\n0::/\n")
      .with("/sys/fs/cgroup/memory/memory.limit_in_bytes", "4294967296\n")
      .with("/sys/fs/cgroup/memory/memory.usage_in_bytes", "1073741824\n");
  EXPECT_EQ(available_host_memory(machine.root())->bytes, 3 * kGiB);
  // No limit is a number, too.
  machine.with("/sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n");
  EXPECT_EQ(available_host_memory(machine.root())->bytes, 16 * kGiB);
}

RunPlan plan_of(int64_t device, int64_t host) {
  RunPlan plan;
  plan.forecast.bytes.weight = device;
  plan.forecast.bytes.host.moments = host;
  return plan;
}

TEST(MemoryChecks, AddUpTheRanksOfAHost) {
  const AvailableMemory host{23 * kGiB, "a test"};
  const auto checks = memory_checks(plan_of(15 * kGiB, kGiB), {8, 8}, "cpu", 0, host);
  ASSERT_EQ(checks.size(), 1u);
  EXPECT_EQ(checks[0].needed_bytes, 8 * 16 * kGiB);
  EXPECT_FALSE(checks[0].fits());
  EXPECT_EQ(checks[0].text(),
            "memory of this host: 8 ranks need 128.0 GiB without activations, 23.0 GiB are "
            "available (a test): does not fit");
  const auto one = memory_checks(plan_of(15 * kGiB, kGiB), {1, 1}, "cpu", 0, host);
  EXPECT_TRUE(one[0].fits());
  EXPECT_THAT(one[0].text(), Not(HasSubstr("does not fit")));
  EXPECT_TRUE(memory_checks(plan_of(1, 1), {8, 8}, "cpu", 0, std::nullopt).empty());
}

TEST(MemoryChecks, CountDevicesAndTheHostByThemselves) {
  const AvailableMemory host{23 * kGiB, "a test"};
  RunPlan plan = plan_of(30 * kGiB, 3 * kGiB);
  const auto checks = memory_checks(plan, {8, 2}, "cuda:0", 80 * kGiB, host);
  ASSERT_EQ(checks.size(), 2u);
  EXPECT_EQ(checks[0].where, "cuda:0");
  EXPECT_EQ(checks[0].needed_bytes, 60 * kGiB);
  EXPECT_TRUE(checks[0].fits());
  EXPECT_EQ(checks[1].needed_bytes, 24 * kGiB);
  EXPECT_FALSE(checks[1].fits());
  // With the peak of a step, where that is known.
  plan.peak = PeakForecast{};
  plan.peak->state = 50 * kGiB;
  const auto peak = memory_checks(plan, {8, 2}, "cuda:0", 80 * kGiB, host);
  EXPECT_EQ(peak[0].needed_bytes, 100 * kGiB);
  EXPECT_THAT(peak[0].text(), Not(HasSubstr("without activations")));
}

}  // namespace
}  // namespace fsdp::train::machine_memory_test
