// The reduction kernel against libtorch's own conversions, on every value a narrow type can have.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>
#include <utility>
#include <vector>

#include "fsdp/comm/reduce/reduce_ranks.h"
#include "fsdp/comm/reduce/sum_on_device.h"
#include "support/rank_pattern.h"
#include "support/reduction_cases.h"

namespace fsdp::reduce_ranks_test {
namespace {

// Stores into (or adds to) `output`.
void reduce_into(at::Tensor& output, const std::vector<at::Tensor>& inputs,
                 const Reduction& reduction) {
  std::vector<const void*> pointers;
  for (const at::Tensor& input : inputs) pointers.push_back(input.const_data_ptr());
  const ReduceTypes types{inputs[0].scalar_type(), output.scalar_type()};
  reduce_ranks({.inputs = pointers,
                .output = output.mutable_data_ptr(),
                .numel = output.numel(),
                .types = types},
               checked_reduction(reduction, types, "test"));
}

at::Tensor reduced(const std::vector<at::Tensor>& inputs, at::ScalarType result,
                   const Reduction& reduction) {
  at::Tensor output = at::zeros(inputs[0].sizes(), result);
  reduce_into(output, inputs, reduction);
  return output;
}

const std::vector<at::ScalarType> kFloating = {at::kFloat, at::kDouble, at::kBFloat16, at::kHalf};

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
    for (const int64_t shift : {1, 257, 32768}) {
      const at::Tensor b = a.view(at::kShort).roll(shift).view(narrow);
      const at::Tensor expected = (a.to(at::kFloat) + b.to(at::kFloat)).to(narrow);
      const at::Tensor sum = reduced({a, b}, narrow, {});
      EXPECT_TRUE(at::equal(sum.isnan(), expected.isnan())) << narrow << " " << shift;
      EXPECT_TRUE(testing::same_bytes(at::nan_to_num(sum), at::nan_to_num(expected)))
          << narrow << " " << shift;
    }
  }
}

// The value that each of `ranks` gives at each element, widened, combined, scaled, added to `old`
// and rounded once: the definition.
at::Tensor defined(const std::vector<at::Tensor>& inputs, const at::Tensor& old,
                   const Reduction& reduction, at::ScalarType acc) {
  at::Tensor sum = inputs[0].to(acc);
  for (size_t rank = 1; rank < inputs.size(); ++rank) sum = sum + inputs[rank].to(acc);
  double scale = reduction.scale;
  if (reduction.op == ReduceOp::kAvg) scale /= static_cast<double>(inputs.size());
  sum = sum * at::full({1}, scale, sum.options());
  if (reduction.store == Store::kAdd) sum = old.to(acc) + sum;
  return testing::rounded_once(sum, old.scalar_type());
}

// Every wire into every output, both stores, the two-rank loops and the others, ends of blocks and
// of vectors, with and without a flag.
TEST(ReduceRanks, StoresAndAddsInEveryPairOfTypes) {
  for (const at::ScalarType wire : kFloating) {
    for (const at::ScalarType result : kFloating) {
      const bool wide = wire == at::kDouble || result == at::kDouble;
      for (const int ranks : {1, 2, 3}) {
        std::vector<at::Tensor> inputs;
        for (int rank = 0; rank < ranks; ++rank)
          inputs.push_back(testing::rank_pattern(rank, 2075, wire));
        const at::Tensor old = testing::rank_pattern(99, 2075, result);
        for (const Store store : {Store::kWrite, Store::kAdd}) {
          for (const bool watched : {false, true}) {
            Reduction reduction{.op = ReduceOp::kAvg, .scale = 0.7, .store = store};
            if (watched) reduction.nonfinite = at::zeros({1}, at::kFloat);
            at::Tensor output = old.clone();
            reduce_into(output, inputs, reduction);
            EXPECT_TRUE(testing::same_bytes(
                output, defined(inputs, old, reduction, wide ? at::kDouble : at::kFloat)))
                << wire << " into " << result << " from " << ranks << " by " << name_of(store);
            EXPECT_FALSE(watched && reduction.nonfinite.item<float>() != 0.0f);
          }
        }
      }
    }
  }
}

at::Tensor tree_of(std::vector<at::Tensor> values) {
  return testing::combined_in_a_tree(std::move(values), ReduceOp::kSum);
}

TEST(ReduceRanks, AddsInATreeOfWhichGroupsArePartsOrLevels) {
  constexpr int64_t kNumel = 2051;
  for (int ranks = 1; ranks <= 24; ++ranks) {
    std::vector<at::Tensor> values;
    std::vector<const void*> inputs;
    for (int rank = 0; rank < ranks; ++rank) {
      values.push_back(testing::rank_pattern(rank, kNumel, at::kFloat));
      inputs.push_back(values.back().const_data_ptr());
    }
    const at::Tensor of_all = tree_of(values);
    for (int group = 1; group <= ranks; ++group) {
      if (ranks % group != 0) continue;
      std::vector<at::Tensor> groups;
      for (auto at = values.begin(); at != values.end(); at += group)
        groups.push_back(tree_of({at, at + group}));
      const at::Tensor actual = at::empty({kNumel}, at::kFloat);
      reduce_ranks({.inputs = inputs,
                    .output = actual.mutable_data_ptr(),
                    .numel = kNumel,
                    .types = {at::kFloat, at::kFloat},
                    .group = static_cast<size_t>(group)},
                   checked_reduction({}, {at::kFloat, at::kFloat}, "test"));
      EXPECT_TRUE(testing::same_bytes(actual, tree_of(groups))) << ranks << " by " << group;
      const SumOrder order{.ranks = ranks, .group = group};
      EXPECT_EQ(order.adds_like(1), testing::same_bytes(actual, of_all))
          << ranks << " by " << group;
    }
  }
}

// The partial sums of a kernel with few levels, and with many.
template <int kLevels>
float summed_one_by_one(const std::vector<float>& values) {
  SumTree<float, kLevels> tree;
  for (size_t i = 0; i < values.size(); ++i) tree.add(values[i], static_cast<int32_t>(i));
  return tree.total(static_cast<int32_t>(values.size()));
}

TEST(SumTree, AddsOneByOneWhatReduceRanksDoes) {
  std::mt19937 random(3);
  std::normal_distribution<float> normal;
  std::vector<float> values;
  for (size_t count = 1; count < 300; ++count) {
    values.push_back(normal(random));
    std::vector<at::Tensor> tensors;
    for (const float value : values) tensors.push_back(at::scalar_tensor(value));
    const auto expected = tree_of(tensors).item<float>();
    if (count < 8) {
      EXPECT_EQ(summed_one_by_one<3>(values), expected) << count;
    }
    if (count < 16) {
      EXPECT_EQ(summed_one_by_one<4>(values), expected) << count;
    }
    EXPECT_EQ(summed_one_by_one<kSumLevels>(values), expected) << count;
  }
}

// The kernel for small reductions on a device adds as the host does, in every order of sums.
template <typename Number>
void expect_same_row_sums(at::ScalarType type) {
  constexpr int64_t kNumel = 137;
  for (const int ranks : {1, 2, 6, 12}) {
    const at::Tensor rows = at::empty({ranks, kNumel}, type);
    std::vector<const void*> inputs;
    for (int rank = 0; rank < ranks; ++rank) {
      rows[rank].copy_(testing::rank_pattern(rank, kNumel, type));
      inputs.push_back(rows[rank].const_data_ptr());
    }
    for (const int group : {1, 2, 3, 6, 12}) {
      if (ranks % group != 0) continue;
      const at::Tensor expected = at::empty({kNumel}, type);
      reduce_ranks({.inputs = inputs,
                    .output = expected.mutable_data_ptr(),
                    .numel = kNumel,
                    .types = {type, type},
                    .group = static_cast<size_t>(group)},
                   checked_reduction({.scale = 0.3}, {type, type}, "test"));
      const RowSum<Number> sum{.rows = rows.const_data_ptr<Number>(),
                               .numel = kNumel,
                               .ranks = ranks,
                               .group = group,
                               .scale = static_cast<Number>(0.3)};
      at::Tensor actual = at::empty({kNumel}, type);
      for (int64_t i = 0; i < kNumel; ++i) actual.mutable_data_ptr<Number>()[i] = sum.at(i);
      EXPECT_TRUE(testing::same_bytes(actual, expected)) << ranks << " ranks, groups of " << group;
    }
  }
}

TEST(ReduceRanks, AddsRowsOnADeviceInTheSameOrder) {
  expect_same_row_sums<float>(at::kFloat);
  expect_same_row_sums<double>(at::kDouble);
}

// Multiples of 2^-9 up to 1: any 65 of them have a sum of at most 16 bits, so the running sum is
// exact and all error is the one rounding to bf16, at most half an ulp. Summing in bf16 would be
// off by whole per cents.
TEST(ReduceRanks, RoundsTheSumOfSixtyFourNarrowRanksOnce) {
  const auto coarse = [](int rank) {
    return (testing::rank_pattern(rank, 2000, at::kDouble).abs() * 256)
        .ceil()
        .div(512)
        .to(at::kBFloat16);
  };
  for (const Store store : {Store::kWrite, Store::kAdd}) {
    std::vector<at::Tensor> inputs;
    at::Tensor output = coarse(99);
    at::Tensor exact =
        store == Store::kAdd ? output.to(at::kDouble) : at::zeros({2000}, at::kDouble);
    for (int rank = 0; rank < 64; ++rank) {
      inputs.push_back(coarse(rank));
      exact += inputs.back().to(at::kDouble);
    }
    reduce_into(output, inputs, {.store = store});
    // 8 significant bits: an ulp is 2^-7 of the power of two below.
    const at::Tensor half_ulp = exact.log2().floor().exp2() * std::ldexp(1.0, -8);
    EXPECT_TRUE((output.to(at::kDouble) - exact).abs().le(half_ulp).all().item<bool>());
  }
}

// 1 + 2^-8 is a tie between two bf16; a little more in fp64 decides it, which fp32 cannot hold.
TEST(ReduceRanks, RoundsFp64OnceIntoNarrowTypes) {
  const double above = 1.0 + std::ldexp(1.0, -8) + std::ldexp(1.0, -40);
  const double below = 1.0 + 3 * std::ldexp(1.0, -8) - std::ldexp(1.0, -40);
  const at::Tensor input = at::tensor({above, below, -above, -below}, at::kDouble);
  const at::Tensor one_up =
      at::tensor({1.0, 1.0, -1.0, -1.0}, at::kDouble) * (1 + std::ldexp(1.0, -7));
  EXPECT_TRUE(at::equal(reduced({input}, at::kBFloat16, {}).to(at::kDouble), one_up));
  const at::Tensor fine =
      at::tensor({1.0 + std::ldexp(1.0, -11) + std::ldexp(1.0, -40)}, at::kDouble);
  EXPECT_EQ(reduced({fine}, at::kHalf, {}).item<double>(), 1.0 + std::ldexp(1.0, -10));
}

TEST(ReduceRanks, RaisesTheFlagForEveryNonfiniteStoredValue) {
  const double inf = std::numeric_limits<double>::infinity();
  for (const at::ScalarType wire : kFloating) {
    for (const at::ScalarType result : kFloating) {
      for (const int ranks : {1, 2, 3}) {
        for (const double bad : {inf, -inf, std::numeric_limits<double>::quiet_NaN()}) {
          for (const int64_t place : {0, 15, 16, 2047, 2048, 2074}) {
            std::vector<at::Tensor> inputs(static_cast<size_t>(ranks), at::ones({2075}, wire));
            inputs.back() = inputs.back().clone();
            inputs.back()[place].fill_(bad);
            const at::Tensor flag = at::zeros({1}, at::kFloat);
            reduced(inputs, result, {.nonfinite = flag});
            EXPECT_EQ(flag.item<float>(), 1.0f) << wire << " into " << result << " at " << place;
          }
        }
      }
    }
  }
}

TEST(ReduceRanks, RaisesTheFlagForValuesThatOverflowWhenStored) {
  const auto flag_of = [](double value, at::ScalarType wire, at::ScalarType result) {
    const at::Tensor flag = at::zeros({1}, at::kFloat);
    reduced({at::full({40}, value, wire)}, result, {.nonfinite = flag});
    return flag.item<float>();
  };
  EXPECT_EQ(flag_of(70000, at::kFloat, at::kHalf), 1.0f);
  EXPECT_EQ(flag_of(65504, at::kFloat, at::kHalf), 0.0f);
  EXPECT_EQ(flag_of(3.4e38, at::kFloat, at::kBFloat16), 1.0f);
  // Finite, though forty of them overflow any sum that is kept of them.
  EXPECT_EQ(flag_of(3.3e38, at::kFloat, at::kBFloat16), 0.0f);
  EXPECT_EQ(flag_of(3.4e38, at::kFloat, at::kFloat), 0.0f);
  EXPECT_EQ(flag_of(1e300, at::kDouble, at::kFloat), 1.0f);
  const at::Tensor raised = at::ones({1}, at::kFloat);
  reduced({at::ones({100}), at::ones({100})}, at::kFloat, {.nonfinite = raised});
  EXPECT_EQ(raised.item<float>(), 1.0f) << "a raised flag stays";
}

TEST(ReduceRanks, AddsUpTheSquaresOfWhatItStores) {
  for (const at::ScalarType wire : kFloating)
    for (const at::ScalarType result : kFloating)
      for (const int ranks : {1, 2, 3, 5})
        for (const int64_t numel : {0, 1, 7, 511, 512, 513, 5000}) {
          std::vector<at::Tensor> inputs;
          for (int rank = 0; rank < ranks; ++rank)
            inputs.push_back(testing::rank_pattern(rank, numel, wire));
          const at::Tensor squares = at::full({1}, 3.0, at::kDouble);
          const at::Tensor flag = at::zeros({1}, at::kFloat);
          const at::Tensor stored =
              reduced(inputs, result, {.scale = 0.7, .nonfinite = flag, .squares = squares});
          const double expected = 3.0 + stored.to(at::kDouble).square().sum().item<double>();
          // 128 additions in fp32, each off by half an ulp at most, before fp64 takes over.
          EXPECT_NEAR(squares.item<double>(), expected, 129 * 0x1p-24 * expected)
              << wire << " into " << result << " from " << ranks << ", " << numel;
          EXPECT_EQ(flag.item<float>(), 0.0f);
        }
}

TEST(ReduceRanks, SumOfSquaresIsFiniteIfTheValuesAre) {
  const auto squares_of = [](const at::Tensor& values) {
    const at::Tensor squares = at::zeros({1}, at::kDouble);
    reduced({values}, at::kFloat, {.squares = squares});
    return squares.item<double>();
  };
  const at::Tensor large = at::full({600}, 1e30);  // whose squares are no fp32 numbers
  EXPECT_NEAR(squares_of(large), 600 * 1e60, 1e57);
  for (const double bad : {NAN, INFINITY, -INFINITY}) {
    at::Tensor with_one = large.clone();
    with_one[599].fill_(bad);
    EXPECT_FALSE(std::isfinite(squares_of(with_one)));
  }
}

}  // namespace
}  // namespace fsdp::reduce_ranks_test
