// The loss of a head without all logits on a CUDA device: its kernel, and the whole of it.
#include "fsdp/nn/layers/head_loss.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>

#include "fsdp/base/text.h"
#include "support/allocation_log.h"
#include "support/device_layers.h"

namespace fsdp::nn::head_loss_device_test {
namespace {

using namespace device_layers;

// --- rows of logits ------------------------------------------------------------------------------

at::Tensor some_targets(int64_t rows, int64_t vocabulary) {
  const at::Tensor targets =
      at::randint(vocabulary, {rows}, at::device(at::kCUDA).dtype(at::kLong));
  return targets.masked_fill_(at::arange(rows, targets.options()).remainder(3).eq(1), kNoTarget);
}

at::Tensor sums_of(const at::Tensor& logits) {
  return at::empty({kRowSums, logits.size(0)}, logits.options().dtype(at::kFloat));
}

void check_cross_entropy(const at::Tensor& logits, const at::Tensor& targets) {
  const double count = std::max(1.0, targets.ne(kNoTarget).sum().item<double>());
  const Function formula = [&](const Tensors& in) {
    return Tensors{
        at::nll_loss(at::log_softmax(in[0], -1), targets, {}, at::Reduction::Sum, kNoTarget) /
        count};
  };
  const Tensors expected =
      outputs_and_gradients(formula, in_double({logits}),
                            {at::full({}, count, at::device(at::kCUDA).dtype(at::kDouble))});
  const LogitRows rows{.logits = logits.clone(),
                       .targets = targets,
                       .sums = sums_of(logits),
                       .vocabulary = logits.size(1)};
  const at::Tensor gradient = cross_entropy_rows(RowWork::kBoth, rows);
  const MeanLoss mean = mean_cross_entropy(rows.sums, targets, targets);
  // Exponents of up to 30 in fp32, and so are their sums' logarithms.
  constexpr double kUnits = 64 * 0x1p-24;
  EXPECT_EQ(mean.weight.item<float>(), static_cast<float>(1.0 / count));
  expect_rounded(mean.loss, expected[0], (expected[0].abs() + 1.0) * kUnits, "loss");
  expect_rounded(gradient, expected[1], (expected[1].abs() + 0.1) * kUnits, "gradient");
  EXPECT_EQ(gradient.masked_select(targets.eq(kNoTarget).unsqueeze(1)).abs().sum().item<double>(),
            0.0);

  LogitRows again = rows;
  again.logits = logits.clone();
  again.sums = sums_of(logits);
  EXPECT_FALSE(cross_entropy_rows(RowWork::kSums, again).defined());
  EXPECT_TRUE(at::equal(again.sums, rows.sums));
  EXPECT_TRUE(at::equal(again.logits, logits));
  EXPECT_TRUE(at::equal(cross_entropy_rows(RowWork::kGradient, again), gradient));
}

TEST(CrossEntropyOnDevice, EqualsItsFormulaRoundedOnce) {
  FSDP_REQUIRE_DEVICE_LAYERS();
  at::manual_seed(4);
  for (const at::ScalarType type : kTypes)
    for (const auto& [rows, vocabulary] : std::vector<std::pair<int64_t, int64_t>>{
             {1, 1}, {5, 11}, {64, 257}, {33, 32000}, {9, 5003}}) {
      const at::Tensor logits = numbers({rows, vocabulary}, type, 4.0);
      check_cross_entropy(logits, some_targets(rows, vocabulary));
      check_cross_entropy(logits - 900.0, some_targets(rows, vocabulary));
    }
}

// Ranks that share the vocabulary have such columns.
TEST(CrossEntropyOnDevice, HasTheTargetsOfItsColumnsAlone) {
  FSDP_REQUIRE_DEVICE_LAYERS();
  at::manual_seed(5);
  const at::Tensor logits = numbers({40, 300}, at::kFloat, 3.0);
  const at::Tensor targets = some_targets(40, 900);
  const LogitRows rows{.logits = logits.clone(),
                       .targets = targets,
                       .sums = sums_of(logits),
                       .first_token = 300,
                       .vocabulary = 900};
  const at::Tensor gradient = cross_entropy_rows(RowWork::kBoth, rows);
  const at::Tensor is_column = targets.ge(300).logical_and_(targets.lt(600));
  const at::Tensor row_sums = gradient.sum(1);  // of probabilities, and minus one at a target
  const at::Tensor expected = targets.ne(kNoTarget).to(at::kFloat) - is_column.to(at::kFloat);
  EXPECT_LT((row_sums - expected).abs().max().item<double>(), 1e-5);
  EXPECT_EQ(rows.sums[2].masked_select(is_column.logical_not()).abs().sum().item<double>(), 0.0);
}

// --- head and cross entropy ----------------------------------------------------------------------

void check_head_loss(at::ScalarType type, int64_t rows, int64_t vocabulary, int64_t chunk) {
  const at::Tensor targets = some_targets(rows, vocabulary);
  const Tensors values = {numbers({rows, 64}, type), numbers({vocabulary, 64}, type, 0.3)};
  const double count = std::max(1.0, targets.ne(kNoTarget).sum().item<double>());
  const Function ours = [&](const Tensors& in) {
    return Tensors{head_loss(in[0], in[1], targets,
                             {.logit_bytes = chunk * vocabulary * values[0].element_size()})};
  };
  const Function formula = [&](const Tensors& in) {
    return Tensors{at::nll_loss(at::log_softmax(at::linear(in[0], in[1]), -1), targets, {},
                                at::Reduction::Sum, kNoTarget) /
                   count};
  };
  for (const double scale : {1.0, 1024.0}) {
    const Tensors gradient = {
        at::full({}, scale, at::device(at::kCUDA).dtype(at::kFloat)).to(at::kDouble)};
    const Tensors actual = outputs_and_gradients(ours, values, gradient);
    const Tensors expected = outputs_and_gradients(formula, in_double(values), gradient);
    // Logits are rounded, softmax minus one is, and products add up either.
    for (size_t i = 0; i < actual.size(); ++i)
      expect_rounded(actual[i], expected[i],
                     expected[i].abs().max() * 8 * std::max(half_unit(type), 0x1p-20),
                     concat("head_loss ", i, ", chunks of ", chunk));
  }
}

TEST(HeadLossOnDevice, EqualsItsFormulaForEveryChunk) {
  FSDP_REQUIRE_DEVICE_LAYERS();
  at::manual_seed(7);
  for (const at::ScalarType type : kTypes)
    for (const auto& [rows, vocabulary] :
         std::vector<std::pair<int64_t, int64_t>>{{1, 8}, {50, 264}, {96, 5003}})
      for (const int64_t chunk : {int64_t{1}, int64_t{16}, rows})
        check_head_loss(type, rows, vocabulary, chunk);
}

TEST(HeadLossOnDevice, IsZeroWhereNothingIsPredicted) {
  FSDP_REQUIRE_DEVICE_LAYERS();
  for (const at::ScalarType type : kTypes) {
    for (const int64_t rows : {0, 6}) {
      const at::Tensor hidden = numbers({rows, 16}, type).set_requires_grad(true);
      const at::Tensor weight = numbers({40, 16}, type).set_requires_grad(true);
      const at::Tensor targets =
          at::full({rows}, kNoTarget, at::device(at::kCUDA).dtype(at::kLong));
      const at::Tensor loss = head_loss(hidden, weight, targets);
      loss.backward();
      EXPECT_EQ(loss.item<double>(), 0.0);
      EXPECT_EQ(hidden.grad().sizes(), hidden.sizes());
      EXPECT_EQ(hidden.grad().abs().sum().item<double>(), 0.0);
      EXPECT_EQ(weight.grad().abs().sum().item<double>(), 0.0);
    }
  }
}

TEST(HeadLossOnDevice, HasTheSameGradientsAgain) {
  FSDP_REQUIRE_DEVICE_LAYERS();
  const at::Tensor hidden = numbers({2, 16, 64}, at::kBFloat16).set_requires_grad(true);
  const at::Tensor weight = numbers({4000, 64}, at::kBFloat16).set_requires_grad(true);
  const at::Tensor loss =
      head_loss(hidden, weight, some_targets(32, 4000).view({2, 16}), {.logit_bytes = 80000});
  loss.backward({}, /*keep_graph=*/true);
  const Tensors first = {hidden.grad().clone(), weight.grad().clone()};
  hidden.mutable_grad() = weight.mutable_grad() = at::Tensor();
  loss.backward();
  EXPECT_TRUE(at::equal(first[0], hidden.grad()));
  EXPECT_TRUE(at::equal(first[1], weight.grad()));
}

// At most a chunk of logits, the fp32 gradient of the weight, and the weight's gradient in its
// type.
TEST(HeadLossOnDevice, NeverHasAllLogits) {
  FSDP_REQUIRE_DEVICE_LAYERS();
  constexpr int64_t kRows = 1024;
  constexpr int64_t kVocabulary = 32000;
  const at::Tensor hidden = numbers({kRows, 64}, at::kBFloat16).set_requires_grad(true);
  const at::Tensor weight = numbers({kVocabulary, 64}, at::kBFloat16).set_requires_grad(true);
  const at::Tensor targets = some_targets(kRows, kVocabulary);
  constexpr int64_t kChunk = 64 * kVocabulary * 2;
  head_loss(hidden, weight, targets, {.logit_bytes = kChunk}).backward();  // workspaces
  hidden.mutable_grad() = weight.mutable_grad() = at::Tensor();
  const testing::AllocationLog log;
  head_loss(hidden, weight, targets, {.logit_bytes = kChunk}).backward();
  constexpr int64_t kWeight = kVocabulary * 64;
  EXPECT_LE(log.peak_bytes(), std::max(kChunk + kWeight * 4, kWeight * (4 + 2)) +
                                  4 * kRows * 64 * 2 + (int64_t{3} << 20));
}

TEST(HeadLossOnDeviceDeathTest, StopsAtTargetsThatAreNoTokens) {
  FSDP_REQUIRE_DEVICE_LAYERS();
  GTEST_FLAG_SET(death_test_style, "threadsafe");  // the device is of no more use to its process
  const auto exit_code = [] {
    const at::Tensor targets = at::full({3}, 40, at::device(at::kCUDA).dtype(at::kLong));
    try {
      head_loss(numbers({3, 16}, at::kBFloat16), numbers({40, 16}, at::kBFloat16), targets)
          .item<float>();
    } catch (const std::exception&) {
      return 3;
    }
    return 0;
  };
  // CUDA prints the assertion's sentence, but not always where processes share a GPU.
  EXPECT_EXIT(std::_Exit(exit_code()), ::testing::ExitedWithCode(3), "");
}

TEST(HeadLossOnDevice, ComputesTheSameBitsInEveryRun) {
  FSDP_REQUIRE_DEVICE_LAYERS();
  at::manual_seed(6);
  const auto random = [](at::IntArrayRef shape) { return numbers(shape, at::kBFloat16); };
  const at::Tensor targets = some_targets(300, 32000);
  expect_same_again(
      [&](const Tensors& in) {
        return Tensors{head_loss(in[0], in[1], targets, {.logit_bytes = 100 * 32000 * 2})};
      },
      {random({300, 64}), random({32000, 64})}, {random({}).to(at::kDouble)}, "head_loss");
}

}  // namespace
}  // namespace fsdp::nn::head_loss_device_test
