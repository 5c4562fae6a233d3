// The loss of a head without all logits: against its formula, for every size of chunks, and on
// ranks that have a part of the vocabulary or of the tokens.
#include "fsdp/nn/layers/head_loss.h"

#include <gtest/gtest.h>

#include <cmath>

#include "fsdp/base/text.h"
#include "fsdp/comm/communicator.h"
#include "fsdp/nn/kernels/layer_kernels.h"
#include "support/layer_gradients.h"
#include "support/run_ranks.h"
#include "support/watched_memory.h"

namespace fsdp::nn::head_loss_test {
namespace {

using testing::expect_near;
using testing::output_and_gradients;
using testing::run_ranks;
using testing::TensorAllocations;
using testing::waves;

constexpr int64_t kHidden = 24;

// [2, rows / 2], some of them none.
at::Tensor some_targets(int64_t rows, int64_t vocabulary) {
  const at::Tensor index = at::arange(rows, at::kLong);
  return (index * 7)
      .remainder_(vocabulary)
      .masked_fill_(index.remainder(3).eq(1), kNoTarget)
      .view({2, -1});
}

std::vector<at::Tensor> hidden_and_weight(int64_t rows, int64_t vocabulary) {
  return {waves({2, rows / 2, kHidden}, 0.0), waves({vocabulary, kHidden}, 0.4)};
}

at::Tensor formula(const std::vector<at::Tensor>& in, const at::Tensor& targets) {
  const at::Tensor logits = at::linear(in[0], in[1]).flatten(0, 1);
  const at::Tensor sum = at::nll_loss(at::log_softmax(logits, 1), targets.flatten(), {},
                                      at::Reduction::Sum, kNoTarget);
  return sum / std::max(1.0, targets.ne(kNoTarget).sum().item<double>());
}

// A chunk of so many rows.
HeadLossOptions chunks_of(int64_t rows, int64_t vocabulary, at::ScalarType type = at::kFloat) {
  return {.logit_bytes = rows * vocabulary * static_cast<int64_t>(c10::elementSize(type))};
}

TEST(HeadLoss, EqualsItsFormulaInDoublePrecisionForEveryChunk) {
  for (const auto& [rows, vocabulary] :
       std::vector<std::pair<int64_t, int64_t>>{{2, 1}, {34, 11}, {90, 257}}) {
    const at::Tensor targets = some_targets(rows, vocabulary);
    const auto values = hidden_and_weight(rows, vocabulary);
    const auto expected = output_and_gradients([&](const auto& in) { return formula(in, targets); },
                                               values, at::kDouble);
    for (const int64_t chunk : {int64_t{1}, int64_t{3}, int64_t{16}, int64_t{40}, rows}) {
      const auto ours = [&](const auto& in) {
        return head_loss(in[0], in[1], targets, chunks_of(chunk, vocabulary));
      };
      expect_near(output_and_gradients(ours, values, at::kFloat), expected, 2e-6,
                  concat(rows, " rows in chunks of ", chunk));
    }
  }
}

// Logits are rounded, and so are softmax minus one and the hidden rows' gradient: each by half a
// unit, of sums of about as many terms as matter. Weights' gradients are sums in fp32.
TEST(HeadLoss, OfNarrowTypesIsThatOfFp32Rounded) {
  constexpr int64_t kRows = 64;
  constexpr int64_t kVocabulary = 101;
  const at::Tensor targets = some_targets(kRows, kVocabulary);
  for (const auto& [type, unit] : {std::pair{at::kBFloat16, 0x1p-8}, {at::kHalf, 0x1p-11}}) {
    std::vector<at::Tensor> values;
    for (const at::Tensor& value : hidden_and_weight(kRows, kVocabulary))
      values.push_back(value.to(type).to(at::kFloat));
    const auto expected = output_and_gradients([&](const auto& in) { return formula(in, targets); },
                                               values, at::kDouble);
    for (const int64_t chunk : {kRows, int64_t{1}, int64_t{17}}) {
      const auto actual = output_and_gradients(
          [&, type = type](const auto& in) {
            const at::Tensor loss =
                head_loss(in[0], in[1], targets, chunks_of(chunk, kVocabulary, type));
            EXPECT_EQ(loss.scalar_type(), at::kFloat);
            return loss;
          },
          values, type);
      EXPECT_EQ(actual[1].scalar_type(), type);
      EXPECT_EQ(actual[2].scalar_type(), type);
      expect_near(actual, expected, 4 * unit, concat(c10::toString(type), " by ", chunk));
    }
  }
}

// Training in fp16: what a scale of 2^16 makes of the gradients is finite, and no more than
// rounded. Many rows with one target, whose sum does not fit fp16 before it is divided.
TEST(HeadLoss, HasGradientsOfScaledLosses) {
  constexpr int64_t kRows = 2048;
  constexpr int64_t kVocabulary = 37;
  const at::Tensor targets = at::full({2, kRows / 2}, 5, at::kLong);
  const auto gradients = [&](double scale, at::ScalarType type) {
    const at::Tensor hidden =
        at::full({2, kRows / 2, kHidden}, 50.0).to(type).set_requires_grad(true);
    const at::Tensor weight = at::zeros({kVocabulary, kHidden}).to(type).set_requires_grad(true);
    const at::Tensor loss = head_loss(hidden, weight, targets);
    (loss * scale).backward();
    return std::vector<at::Tensor>{loss.detach(), hidden.grad(), weight.grad()};
  };
  const auto narrow = gradients(1024.0, at::kHalf);
  const auto wide = gradients(1024.0, at::kFloat);
  expect_near(narrow, {wide[0].to(at::kDouble), wide[1].to(at::kDouble), wide[2].to(at::kDouble)},
              0x1p-10, "a scaled loss");
  const auto unscaled = gradients(1.0, at::kFloat);
  for (const size_t i : {1, 2}) EXPECT_TRUE(at::equal(unscaled[i] * 1024.0, wide[i]));
}

TEST(HeadLoss, IsZeroWhereNothingIsPredicted) {
  for (const int64_t rows : {0, 6}) {
    const at::Tensor targets = at::full({2, rows / 2}, kNoTarget, at::kLong);
    const at::Tensor hidden = waves({2, rows / 2, kHidden}, 0.0).set_requires_grad(true);
    const at::Tensor weight = waves({11, kHidden}, 0.0).set_requires_grad(true);
    const at::Tensor loss = head_loss(hidden, weight, targets, chunks_of(2, 11));
    EXPECT_EQ(loss.item<double>(), 0.0);
    loss.backward();
    EXPECT_TRUE(at::equal(hidden.grad(), at::zeros_like(hidden)));
    EXPECT_TRUE(at::equal(weight.grad(), at::zeros_like(weight)));
  }
}

TEST(HeadLoss, HasTheSameGradientsAgain) {
  const at::Tensor targets = some_targets(20, 11);
  const auto values = hidden_and_weight(20, 11);
  const at::Tensor hidden = values[0].set_requires_grad(true);
  const at::Tensor weight = values[1].set_requires_grad(true);
  const at::Tensor loss = head_loss(hidden, weight, targets, chunks_of(3, 11));
  loss.backward({}, /*keep_graph=*/true);
  const at::Tensor first = weight.grad().clone();
  weight.mutable_grad() = hidden.mutable_grad() = at::Tensor();
  loss.backward();
  EXPECT_TRUE(at::equal(first, weight.grad()));
}

TEST(HeadLoss, RefusesTargetsThatAreNoTokens) {
  const auto values = hidden_and_weight(4, 11);
  for (const int64_t target : {-1, 11})
    EXPECT_THROW(head_loss(values[0], values[1], at::full({2, 2}, target, at::kLong)), c10::Error);
}

// --- memory --------------------------------------------------------------------------------------

constexpr int64_t kManyRows = 256;
constexpr int64_t kManyTokens = 5000;
constexpr int64_t kChunk = 16;
constexpr int64_t kChunkBytes = kChunk * kManyTokens * 4;
constexpr int64_t kWeightBytes = kManyTokens * kHidden * 4;

TEST(HeadLoss, NeverHasAllLogits) {
  const at::Tensor targets = some_targets(kManyRows, kManyTokens);
  const auto values = hidden_and_weight(kManyRows, kManyTokens);
  const at::Tensor hidden = values[0].set_requires_grad(true);
  const at::Tensor weight = values[1].set_requires_grad(true);
  const TensorAllocations memory;
  head_loss(hidden, weight, targets, chunks_of(kChunk, kManyTokens)).backward();
  const int64_t hidden_bytes = kManyRows * kHidden * 4;
  EXPECT_LE(memory.largest_bytes(), std::max(kChunkBytes, kWeightBytes));
  // Logits and log-probabilities of a chunk; the weight's gradient and what autograd gets of it;
  // the same of hidden; numbers of rows.
  EXPECT_LE(memory.peak_bytes(),
            2 * kChunkBytes + 2 * kWeightBytes + 2 * hidden_bytes + 64 * kManyRows);
  EXPECT_LT(memory.peak_bytes(), kManyRows * kManyTokens * 4 / 2);
}

TEST(HeadLoss, ComputesNoGradientThatNobodyWants) {
  const at::Tensor targets = some_targets(kManyRows, kManyTokens);
  const auto values = hidden_and_weight(kManyRows, kManyTokens);
  const auto peak = [&](bool trains_hidden, bool trains_weight) {
    const at::Tensor hidden = values[0].clone().set_requires_grad(trains_hidden);
    const at::Tensor weight = values[1].clone().set_requires_grad(trains_weight);
    const TensorAllocations memory;
    const at::Tensor loss = head_loss(hidden, weight, targets, chunks_of(1, kManyTokens));
    EXPECT_EQ(loss.requires_grad(), at::GradMode::is_enabled() && (trains_hidden || trains_weight));
    if (loss.requires_grad()) loss.backward();
    EXPECT_EQ(hidden.grad().defined(), loss.requires_grad() && trains_hidden);
    EXPECT_EQ(weight.grad().defined(), loss.requires_grad() && trains_weight);
    return memory.peak_bytes();
  };
  EXPECT_LT(peak(false, false), kWeightBytes / 2);
  EXPECT_LT(peak(true, false), kWeightBytes / 2);
  EXPECT_GT(peak(false, true), kWeightBytes);
  const at::NoGradGuard no_grad;
  EXPECT_LT(peak(true, true), kWeightBytes / 2);
}

// --- ranks ---------------------------------------------------------------------------------------

void check_ranks(int num_ranks, const at::Tensor& targets, at::ScalarType type) {
  const int64_t sequence = targets.size(1);
  const int64_t vocabulary = 40;
  const auto input = [&] {
    return std::vector<at::Tensor>{waves({2, sequence, kHidden}, 0.0).to(type),
                                   waves({vocabulary, kHidden}, 0.4, 2.0).to(type)};
  };
  const auto whole = input();
  for (const at::Tensor& each : whole) each.set_requires_grad(true);
  const at::Tensor expected = head_loss(whole[0], whole[1], targets);
  (expected * 4.0).backward();
  // Logits reach 48, so that logarithms of sums have units of 4e-6; in bf16 each rank rounds its
  // part of the hidden rows' gradient.
  const double tolerance = type == at::kFloat ? 1e-5 : num_ranks * 0x1p-8;
  run_ranks(num_ranks, [&](World& world) {
    const Mesh mesh = world.mesh({.tp = num_ranks});
    const auto own = [&](const at::Tensor& all, int64_t dim) {
      return all.chunk(num_ranks, dim)[static_cast<size_t>(world.rank())];
    };
    for (const LogitPart part : {LogitPart::kVocabulary, LogitPart::kSequence})
      for (const int64_t chunk : {5, 1000}) {
        const bool by_token = part == LogitPart::kVocabulary;
        const at::Tensor hidden = own(input()[0], 1).clone().set_requires_grad(true);
        const at::Tensor weight =
            (by_token ? own(input()[1], 0).clone() : input()[1]).set_requires_grad(true);
        HeadLossOptions options = chunks_of(chunk, weight.size(0), type);
        options.ranks = {mesh.tp(), part};
        const at::Tensor loss = head_loss(hidden, weight, targets, options);
        (loss * 4.0).backward();
        const at::Tensor weight_gradient = weight.grad().to(at::kFloat);
        if (!by_token) mesh.tp()->gather().all_reduce(weight_gradient, {}, "parts").wait();
        expect_near({loss.detach(), hidden.grad(), weight_gradient},
                    {expected.detach().to(at::kDouble), own(whole[0].grad(), 1).to(at::kDouble),
                     (by_token ? own(whole[1].grad(), 0) : whole[1].grad()).to(at::kDouble)},
                    tolerance, concat(num_ranks, " ranks, chunks of ", chunk));
        const at::NoGradGuard no_grad;
        EXPECT_EQ(head_loss(hidden, weight, targets, options).item<float>(), loss.item<float>());
      }
  });
}

TEST(HeadLoss, IsThatOfAllTokensOnRanksThatShareThem) {
  at::Tensor targets = at::arange(16, at::kLong).mul_(7).remainder_(40).view({2, 8});
  targets.narrow(1, 0, 3).fill_(kNoTarget);  // all places of the first of four, and more
  check_ranks(4, targets, at::kFloat);
  check_ranks(2, targets, at::kBFloat16);
  check_ranks(2, at::full_like(targets, kNoTarget), at::kFloat);
}

}  // namespace
}  // namespace fsdp::nn::head_loss_test
