// Every flag reaches the option of engine, optimizer and checkpoints that it is for.
#include "fsdp/train/run_options.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "fsdp/base/error.h"
#include "fsdp/train/settings/settings.h"

namespace fsdp::train::run_options_test {
namespace {

TrainOptions given(const GivenValues& values) {
  TrainOptions options;
  apply_given(options, values);
  return options;
}

TEST(ShardOptionsOf, TheRunAddsDeviceAndMatrices) {
  const ShardOptions shard =
      shard_options(given({{"prefetch", {"3"}}, {"name-nan", {"true"}}}), c10::kCPU);
  EXPECT_EQ(shard.prefetch, 3);
  EXPECT_EQ(shard.report_nan, ReportNan::kPerParameter);
  EXPECT_EQ(shard.device, c10::Device(c10::kCPU));
  EXPECT_EQ(shard.matrices, WholeMatrices{});
  EXPECT_TRUE(shard_options(given({{"optimizer", {"muon"}}}), c10::kCPU).matrices.declared);
}

// Eight ranks that see one GPU each: the ranks have counted who computes where.
TEST(RanksHere, AreThoseOfAGpuWhereTheRanksHaveCountedThem) {
  Launch launch;
  launch.size = 16;
  launch.local_size = 8;
  launch.gpu_ranks = 1;
  const RanksHere ranks = ranks_here(launch, 16, c10::Device(c10::kCUDA, 0));
  EXPECT_EQ(ranks.of_host, 8);
  EXPECT_EQ(ranks.of_device, 1);
  EXPECT_EQ(ranks_here(launch, 16, c10::kCPU).of_device, 8);
}

TEST(CommOptionsOf, FlagsWinOverTheEnvironment) {
  ::setenv("FSDP_TIMEOUT_S", "7", 1);
  EXPECT_EQ(comm_options(given({})).timeout_seconds, 7);
  EXPECT_STREQ(comm_options(given({})).timeout_name, "FSDP_TIMEOUT_S");
  EXPECT_EQ(comm_options(given({{"timeout", {"9"}}})).timeout_seconds, 9);
  EXPECT_STREQ(comm_options(given({{"timeout", {"9"}}})).timeout_name, "--timeout");
  ::unsetenv("FSDP_TIMEOUT_S");
  EXPECT_STREQ(comm_options(given({})).timeout_name, "--timeout");
  EXPECT_TRUE(comm_options(given({{"checked", {"true"}}})).checked);
}

TEST(ComputeDtype, IsWhatTheDeviceIsGoodAtUnlessSomebodySaysOtherwise) {
  EXPECT_EQ(compute_dtype(given({}), c10::kCPU), DType::kFloat32);
  EXPECT_EQ(compute_dtype(given({}), c10::Device(c10::kCUDA, 0)), DType::kBFloat16);
  EXPECT_EQ(compute_dtype(given({{"compute", {"fp64"}}}), c10::kCPU), DType::kFloat64);
}

TEST(SlowCompute, IsToldOfCpusWithoutQuickProducts) {
  const CpuTypes plain{};
  const CpuTypes able{.has_bfloat16 = true, .has_float16 = true};
  EXPECT_THAT(slow_compute_text(DType::kBFloat16, c10::kCPU, plain),
              testing::AllOf(testing::StartsWith("--compute is bf16, for which libtorch has no"),
                             testing::EndsWith("use --compute fp32 here")));
  EXPECT_THAT(slow_compute_text(DType::kFloat16, c10::kCPU, {.has_bfloat16 = true}),
              testing::StartsWith("--compute is fp16"));
  EXPECT_EQ(slow_compute_text(DType::kBFloat16, c10::kCPU, able), "");
  EXPECT_EQ(slow_compute_text(DType::kFloat16, c10::kCPU, able), "");
  EXPECT_EQ(slow_compute_text(DType::kFloat32, c10::kCPU, plain), "");
  EXPECT_EQ(slow_compute_text(DType::kBFloat16, c10::Device(c10::kCUDA, 0), plain), "");
}

}  // namespace
}  // namespace fsdp::train::run_options_test
