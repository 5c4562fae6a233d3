// The reduction kernel against libtorch's own conversions, on every value a narrow type can have.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "fsdp/comm/reduce_ranks.h"
#include "support/rank_pattern.h"

namespace fsdp {
namespace {

at::Tensor reduced(const std::vector<at::Tensor>& inputs, at::ScalarType result,
                   const Reduction& reduction) {
  std::vector<const void*> pointers;
  for (const at::Tensor& input : inputs) pointers.push_back(input.const_data_ptr());
  const ReduceTypes types{inputs[0].scalar_type(), result};
  at::Tensor output = at::zeros(inputs[0].sizes(), result);
  reduce_ranks(pointers, output.mutable_data_ptr(), output.numel(), types,
               checked_reduction(reduction, types, "test"));
  return output;
}

// All 65536 bit patterns: infinities, NaNs, subnormals.
at::Tensor every_value(at::ScalarType narrow) {
  return at::arange(-32768, 32768, at::kShort).view(narrow);
}

TEST(ReduceRanks, WidensEveryNarrowValueAsLibtorchDoes) {
  for (const at::ScalarType narrow : {at::kBFloat16, at::kHalf}) {
    const at::Tensor all = every_value(narrow);
    const at::Tensor wide = reduced({all}, at::kFloat, {});
    const at::Tensor expected = all.to(at::kFloat);
    EXPECT_TRUE(at::equal(wide.isnan(), expected.isnan())) << narrow;
    EXPECT_TRUE(testing::same_bytes(at::nan_to_num(wide), at::nan_to_num(expected))) << narrow;
  }
}

// x + y of neighbouring values hits ties, near-ties, overflow to infinity and cancellation.
TEST(ReduceRanks, RoundsAsLibtorchDoes) {
  for (const at::ScalarType narrow : {at::kBFloat16, at::kHalf}) {
    const at::Tensor a = every_value(narrow);
    for (const int64_t shift : {1, 2, 3, 128, 257, 1024, 32768}) {
      const at::Tensor b = a.view(at::kShort).roll(shift).view(narrow);
      const at::Tensor expected = (a.to(at::kFloat) + b.to(at::kFloat)).to(narrow);
      const at::Tensor sum = reduced({a, b}, narrow, {});
      EXPECT_TRUE(at::equal(sum.isnan(), expected.isnan())) << narrow << " " << shift;
      EXPECT_TRUE(testing::same_bytes(at::nan_to_num(sum), at::nan_to_num(expected)))
          << narrow << " " << shift;
    }
  }
}

// 64 ranks: the sum in bf16 would be off by whole per cents; ours is off by one rounding.
TEST(ReduceRanks, SumsSixtyFourNarrowRanksWithOneRounding) {
  std::vector<at::Tensor> inputs;
  at::Tensor exact = at::zeros({10000}, at::kDouble);
  for (int rank = 0; rank < 64; ++rank) {
    inputs.push_back(testing::rank_pattern(rank, 10000, at::kBFloat16).abs());
    exact += inputs.back().to(at::kDouble);
  }
  const at::Tensor sum = reduced(inputs, at::kBFloat16, {}).to(at::kDouble);
  const double worst = ((sum - exact).abs() / exact).max().item<double>();
  EXPECT_LE(worst, std::ldexp(1.0, -8) + 64 * std::ldexp(1.0, -24));
}

TEST(ReduceRanks, HandlesSizesAroundItsBlock) {
  for (const int64_t numel : {0, 1, 2047, 2048, 2049, 6000}) {
    const std::vector<at::Tensor> inputs = {testing::rank_pattern(0, numel, at::kFloat),
                                            testing::rank_pattern(1, numel, at::kFloat),
                                            testing::rank_pattern(2, numel, at::kFloat)};
    EXPECT_TRUE(
        testing::same_bytes(reduced(inputs, at::kFloat, {}), inputs[0] + inputs[1] + inputs[2]))
        << numel;
  }
}

}  // namespace
}  // namespace fsdp
