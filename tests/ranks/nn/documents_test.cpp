// Documents that are packed into one batch: each is computed as if it were alone.
#include "fsdp/nn/layers/documents.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "fsdp/base/error.h"
#include "fsdp/base/text.h"
#include "fsdp/nn/language_model.h"
#include "support/small_models.h"

namespace fsdp::testing::documents_test {
namespace {

using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

// Products of other numbers of rows, and sums over tokens in another order, are off by some
// roundings of fp32 (6e-8), which two to four layers multiply; relative to the largest number.
constexpr double kRounding = 2e-5;

constexpr int64_t kRows = 2;
constexpr int64_t kSequence = 12;
constexpr int64_t kVocabulary = 37;

at::Tensor some_tokens(int64_t phase) {
  return (at::arange(kRows * kSequence, at::kLong) * 7 + phase)
      .remainder(kVocabulary)
      .view({kRows, kSequence});
}

// Packed tokens, the same as documents of their own, and the targets of both.
struct Packed {
  std::shared_ptr<const Documents> documents;
  at::Tensor tokens = some_tokens(3);
  at::Tensor targets = some_tokens(11);

  explicit Packed(const std::vector<int64_t>& starts)
      : documents(std::make_shared<const Documents>(starts, kRows, kSequence, at::kCPU)) {
    const at::Tensor flat = targets.view({-1});
    for (const int64_t start : starts)
      if (start > 0) flat[start - 1] = -100;
    flat[flat.numel() - 1] = -100;
  }
};

struct Result {
  at::Tensor loss;
  std::vector<at::Tensor> terms;
  std::vector<at::Tensor> gradients;
};

Result with_gradients(LanguageModel& model, const ModelLoss& loss) {
  for (const at::Tensor& parameter : model.parameters()) parameter.mutable_grad() = at::Tensor();
  loss.total.backward();
  Result result{loss.total.detach(), {}, {}};
  for (const LossTerm& term : loss.terms) result.terms.push_back(term.value);
  for (const at::Tensor& parameter : model.parameters())
    result.gradients.push_back(parameter.grad().defined() ? parameter.grad().clone()
                                                          : at::zeros_like(parameter));
  return result;
}

// Each document by itself; its loss counts as much as its targets.
Result separate(LanguageModel& model, const Packed& packed) {
  const std::vector<at::Tensor> tokens = packed.documents->divided(packed.tokens);
  const std::vector<at::Tensor> targets = packed.documents->divided(packed.targets);
  const double all = packed.targets.ne(-100).sum().item<double>();
  ModelLoss sum{at::zeros({}), {}};
  for (size_t i = 0; i < tokens.size(); ++i) {
    const double count = targets[i].ne(-100).sum().item<double>();
    if (count > 0) sum.total = sum.total + model.loss(tokens[i], targets[i]).total * (count / all);
  }
  return with_gradients(model, sum);
}

void expect_same(const Result& actual, const Result& expected, const std::string& what) {
  const double loss = expected.loss.item<double>();
  EXPECT_NEAR(actual.loss.item<double>(), loss, kRounding * loss) << what;
  for (size_t i = 0; i < expected.gradients.size(); ++i) {
    const double scale = std::max(1e-3, expected.gradients[i].abs().max().item<double>());
    const double error =
        (actual.gradients[i] - expected.gradients[i]).abs().max().item<double>() / scale;
    EXPECT_LT(error, kRounding) << what << ": gradient " << i;
  }
}

// Models without a loss of balance, which is one of all tokens together.
std::vector<SmallModel> models() {
  LlamaConfig normed = small_llama();
  normed.qk_norm = true;
  MixtralConfig mixtral = small_mixtral();
  mixtral.router_aux_loss_coef = 0.0;
  Qwen3NextConfig next = small_qwen3_next();
  next.router_aux_loss_coef = 0.0;
  DeepseekV3Config latent = small_deepseek();
  latent.decoder.num_nextn_predict_layers = 0;  // separate documents may be too short for it
  latent.router_bias_update_rate = 0.0;
  return {{"llama", small_llama()}, {"mistral", small_mistral()}, {"qwen3", normed},
          {"deepseek", latent},     {"mixtral", mixtral},         {"hybrid", small_hybrid()},
          {"qwen3_next", next}};
}

// Documents of 5, 1, 6, 4 and 8 tokens.
const std::vector<int64_t> kStarts = {0, 5, 6, 12, 16};

TEST(PackedDocuments, HaveTheLossAndTheGradientsOfSeparateForwards) {
  for (const SmallModel& small : models()) {
    const auto model = build_language_model(small.config, {.seed = 5});
    const Packed packed(kStarts);
    const Result together =
        with_gradients(*model, model->loss(packed.tokens, packed.targets, packed.documents));
    expect_same(together, separate(*model, packed), small.name);
    // Without documents these targets are another loss: the test can fail.
    const Result joined = with_gradients(*model, model->loss(packed.tokens, packed.targets));
    EXPECT_GT((joined.gradients[0] - together.gradients[0]).abs().max().item<double>(), 1e-3)
        << small.name;
  }
}

TEST(PackedDocuments, ComputeTheSameAgainInTheBackward) {
  for (const SmallModel& small : models()) {
    const Packed packed(kStarts);
    std::vector<Result> results;
    for (const Recompute recompute : {Recompute::kNone, Recompute::kBlock}) {
      const auto model = build_language_model(small.config, {.seed = 5, .recompute = recompute});
      const ModelLoss loss = model->loss(packed.tokens, packed.targets, packed.documents);
      // Another batch in between must not change what the backward computes again.
      static_cast<void>(model->loss(packed.tokens, packed.targets));
      results.push_back(with_gradients(*model, loss));
    }
    for (size_t i = 0; i < results[0].gradients.size(); ++i)
      EXPECT_TRUE(results[0].gradients[i].equal(results[1].gradients[i])) << small.name << " " << i;
  }
}

// Documents of equal length, so that all means have the same weights.
TEST(PackedDocuments, PredictNoLaterTokenOfAnother) {
  for (const int64_t num_predicted : {1, 2}) {
    LlamaConfig config = small_llama();
    config.num_nextn_predict_layers = num_predicted;
    const auto model = build_language_model(config, {.seed = 5});
    const Packed packed({0, 6, 12, 18});
    const Result together =
        with_gradients(*model, model->loss(packed.tokens, packed.targets, packed.documents));
    expect_same(together, separate(*model, packed), concat(num_predicted));
    EXPECT_EQ(together.terms.size(), 2u);
  }
}

TEST(PackedDocuments, AreCutWithTheirRows) {
  const Documents whole(kStarts, kRows, kSequence, at::kCPU);
  const Documents cut = whole.cut(5);
  EXPECT_EQ(cut.num_documents(), 3);  // the second and third of the first row begin later
  EXPECT_EQ(cut.longest(), 5);
  EXPECT_TRUE(cut.offsets().equal(at::tensor({0, 5, 9, 10}, at::kInt)));
  EXPECT_TRUE(cut.positions().equal(at::tensor({0, 1, 2, 3, 4, 0, 1, 2, 3, 0}).view({2, 5})));
}

TEST(PackedDocuments, MustBeginOneAfterTheOtherAndWithEveryRow) {
  const auto refusal = [](const std::vector<int64_t>& starts, const std::string& text) {
    EXPECT_THAT([&] { Documents(starts, kRows, kSequence, at::kCPU); },
                ThrowsMessage<Error>(HasSubstr(text)));
  };
  refusal({0, 5, 5, 12}, "document 2 begins at token 5 of 24; documents must begin one after");
  refusal({0, 12, 24}, "document 2 begins at token 24 of 24");
  refusal({0, 13}, "documents begin at the first token of 1 rows of 2; every row must begin one");
  refusal({}, "first token of 0 rows of 2");
}

}  // namespace
}  // namespace fsdp::testing::documents_test
