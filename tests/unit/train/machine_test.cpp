// The memory that a host has left, by the files of Linux, whether the ranks of a run fit into it,
// and the peaks that names of GPUs stand for, as drivers report them.
#include "fsdp/train/machine.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>

#include "support/temp_dir.h"

namespace fsdp::train::machine_test {
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

TEST(AvailableMemory, IsTheLeastOfTheKernelAndItsGroups) {
  EXPECT_FALSE(available_host_memory(Machine().root()));
  Machine kernel;
  kernel.with("/proc/meminfo", kMemory).with("/proc/self/cgroup", "0::/\n");
  EXPECT_EQ(available_host_memory(kernel.root())->bytes, 16 * kGiB);
  EXPECT_THAT(available_host_memory(kernel.root())->source, HasSubstr("MemAvailable"));

  Machine job;
  job.with("/proc/meminfo", kMemory)
      .with("/proc/self/cgroup", "0::/job/step\n")
      .with("/sys/fs/cgroup/job/memory.max", "8589934592\n")
      .with("/sys/fs/cgroup/job/memory.current", "3221225472\n")
      .with("/sys/fs/cgroup/job/memory.stat", "anon 1\ninactive_file 2147483648\nfile 5\n")
      .with("/sys/fs/cgroup/job/step/memory.max", "max\n")
      .with("/sys/fs/cgroup/job/step/memory.current", "3221225472\n");
  // 8 GiB, of which 3 are used; 2 of those are pages of files.
  EXPECT_EQ(available_host_memory(job.root())->bytes, 7 * kGiB);
  EXPECT_EQ(available_host_memory(job.root())->source, "the limit of its control group");

  Machine older;
  older.with("/proc/meminfo", kMemory)
      .with("/proc/self/cgroup", "5:cpu:/\n4:memory:/gone/outside\n0::/\n")
      .with("/sys/fs/cgroup/memory/memory.limit_in_bytes", "4294967296\n")
      .with("/sys/fs/cgroup/memory/memory.usage_in_bytes", "1073741824\n");
  EXPECT_EQ(available_host_memory(older.root())->bytes, 3 * kGiB);
  // No limit is a number, too.
  older.with("/sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n");
  EXPECT_EQ(available_host_memory(older.root())->bytes, 16 * kGiB);
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

TEST(IdleGpus, AreThoseThatABuildWithoutCudaCannotUse) {
  Machine machine;
  EXPECT_EQ(idle_gpus_text("libtorch is a CPU build", machine.root()), "");
  machine.with("/proc/driver/nvidia/gpus/0000:01:00.0/information", "Model: NVIDIA H200\n");
  EXPECT_EQ(idle_gpus_text("", machine.root()), "");
  ::unsetenv("CUDA_VISIBLE_DEVICES");
  EXPECT_THAT(idle_gpus_text("libtorch is a CPU build", machine.root()),
              HasSubstr("this host has 1 NVIDIA GPU, but this build is without CUDA (libtorch is a "
                        "CPU build) and trains on the CPU"));
  ::setenv("CUDA_VISIBLE_DEVICES", "", 1);
  EXPECT_EQ(idle_gpus_text("libtorch is a CPU build", machine.root()), "");
}

TEST(PeakRates, AreOfATypeAndOfTheWholeName) {
  using enum ProductType;
  struct Row {
    const char* name;
    ProductType type;
    std::optional<double> peak;
  };
  for (const Row& row : {Row{"NVIDIA A100-SXM4-80GB", kBFloat16, 312},
                         {"A100-SXM4-40GB", kBFloat16, 312},  // of old drivers
                         {"NVIDIA H100 80GB HBM3", kBFloat16, 989.4},
                         {"NVIDIA H100 PCIe", kBFloat16, 756},
                         {"NVIDIA GeForce RTX 4090", kBFloat16, 165.2},
                         {"NVIDIA H200", kFloat16, 989.4},
                         {"NVIDIA H200", kTensorFloat32, 494.7},
                         {"NVIDIA H200", kFloat32, 67},
                         {"Tesla V100-SXM2-16GB", kFloat16, 125},
                         {"Tesla V100-SXM2-16GB", kBFloat16, {}},
                         // With a word more the name is of another device.
                         {"NVIDIA", kBFloat16, {}},
                         {"NVIDIA H200 MIG 7g.141gb", kBFloat16, {}},
                         {"NVIDIA GeForce RTX 4090 Laptop GPU", kBFloat16, {}},
                         {"NVIDIA A10G", kBFloat16, {}},
                         {"NVIDIA H2000", kBFloat16, {}}})
    EXPECT_EQ(known_peak_tflops(row.name, row.type), row.peak) << row.name;
}

}  // namespace
}  // namespace fsdp::train::machine_test
