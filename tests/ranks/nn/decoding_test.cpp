// Token after token, with a cache, a model computes the same as from the whole text.
#include "fsdp/nn/layers/decoding_cache.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "fsdp/nn/config/presets.h"
#include "fsdp/nn/language_model.h"
#include "support/small_models.h"

namespace fsdp::decoding_test {
namespace {

// Sums in another order: some roundings of fp32, relative to the largest logit.
constexpr double kRounding = 2e-5;

// Tokens are shown in parts of these lengths.
void expect_same_logits(const testing::SmallModel& each, const std::vector<int64_t>& parts) {
  const at::NoGradGuard no_grad;
  const auto model = build_language_model(each.config, {.seed = 11});
  testing::disturb(*model);
  int64_t sequence = 0;
  for (const int64_t part : parts) sequence += part;
  const int64_t vocabulary = vocab_size_of(each.config);
  const at::Tensor tokens = (at::arange(2 * sequence) * 37 % vocabulary).view({2, sequence});
  const at::Tensor whole = model->logits(tokens);
  const double allowed = kRounding * whole.abs().max().item<double>();
  DecodingCache cache;
  int64_t end = 0;
  for (const int64_t part : parts) {
    const at::Tensor next = model->next_logits(tokens.narrow(1, end, part), cache);
    end += part;
    ASSERT_EQ(next.sizes(), (std::vector<int64_t>{2, vocabulary})) << each.name;
    const double off = (next - whole.select(1, end - 1)).abs().max().item<double>();
    EXPECT_LE(off, allowed) << each.name << ", after " << end << " tokens";
  }
}

std::vector<testing::SmallModel> all_models() {
  std::vector<testing::SmallModel> models = testing::small_models();
  for (const char* name : {"tiny", "moe-tiny", "hybrid-tiny", "delta-tiny", "mla-tiny"})
    models.push_back({name, find_preset(name)->config});
  return models;
}

TEST(NextLogits, AreThoseOfTheWholeTextHoweverItIsCut) {
  for (const testing::SmallModel& each : all_models()) {
    expect_same_logits(each, {9, 1, 1, 1});
    expect_same_logits(each, {1, 1, 6, 1, 4});
  }
}

}  // namespace
}  // namespace fsdp::decoding_test
