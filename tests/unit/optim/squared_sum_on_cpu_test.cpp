// The sum of a gradient's squares, which its norm is the root of.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <vector>

#include "fsdp/base/error.h"
#include "fsdp/optim/kernels/update_kernels.h"
#include "support/update_case.h"

namespace fsdp::squared_sum_on_cpu_test {
namespace {

TEST(SquaredSumOnCpu, AgreesWithASumInOrder) {
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16})
    for (const int64_t numel : {0, 1, 15, 16, 17, 5001}) {
      testing::UpdateMemory memory({.gradient = dtype}, numel, 0);
      memory.draw_gradients(2);
      double expected = 0;
      for (int64_t i = 0; i < numel; ++i)
        expected += std::pow(testing::decoded(dtype, memory.gradient.data(), i), 2);
      EXPECT_NEAR(squared_sum_on_cpu(memory.gradient.data(), dtype, numel), expected,
                  1e-13 * expected);
    }
}

TEST(SquaredSumOnCpu, IsFiniteIfAndOnlyIfAllNumbersAre) {
  std::vector<float> values(100, std::numeric_limits<float>::max());
  const double largest = std::numeric_limits<float>::max();
  EXPECT_NEAR(squared_sum_on_cpu(values.data(), DType::kFloat32, 100) / (100 * largest * largest),
              1.0, 1e-12);
  for (const float bad : {HUGE_VALF, -HUGE_VALF, std::nanf("")})
    for (const size_t place : {0u, 50u, 99u}) {
      std::vector<float> with_bad = values;
      with_bad[place] = bad;
      EXPECT_FALSE(std::isfinite(squared_sum_on_cpu(with_bad.data(), DType::kFloat32, 100)));
    }
}

TEST(SquaredSumOnCpu, SaysWhichTypeHasNone) {
  EXPECT_THAT([] { squared_sum_on_cpu(nullptr, DType::kInt32, 0); },
              ::testing::ThrowsMessage<Error>(::testing::HasSubstr("squared sum of int32")));
}

}  // namespace
}  // namespace fsdp::squared_sum_on_cpu_test
