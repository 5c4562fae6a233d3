// Which token comes next, and that all ranks of a sharded model write the same text.
#include "fsdp/train/model/trained_model.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>

#include "fsdp/comm/world.h"
#include "fsdp/data/tokenizer.h"
#include "fsdp/nn/config/presets.h"
#include "fsdp/shard/fully_shard.h"

namespace fsdp::train::text_generation_test {
namespace {

const std::vector<float> kLogits = {0.0f, 2.0f, 1.0f, 2.0f};

TEST(ChooseToken, DrawsTokensAsOftenAsTheirProbabilitySays) {
  // exp(2 ln 2) = 4 and exp(ln 2) = 2: of 1 + 4 + 2 + 4 = 11 parts.
  const float ln2 = 0.6931472f;
  const std::vector<float> logits = {0.0f, 2 * ln2, ln2, 2 * ln2};
  std::map<int64_t, int> counts;
  constexpr int kDraws = 11000;
  for (int i = 0; i < kDraws; ++i)
    ++counts[choose_token(logits, {.temperature = 1}, (i + 0.5) / kDraws)];
  EXPECT_NEAR(counts[0], 1000, 1);
  EXPECT_NEAR(counts[1], 4000, 1);
  EXPECT_NEAR(counts[2], 2000, 1);
  EXPECT_NEAR(counts[3], 4000, 1);
}

TEST(ChooseToken, TakesTheLikeliestAtALowTemperature) {
  EXPECT_EQ(choose_token(kLogits, {.temperature = 0}, 0.99), 1);
  EXPECT_EQ(choose_token(kLogits, {.temperature = 0.01}, 0.25), 1);
  EXPECT_EQ(choose_token(kLogits, {.temperature = 0.01}, 0.75), 3);
}

TEST(ChooseToken, TopPLeavesTheUnlikelyOut) {
  // The two likeliest have more than 0.7 together, so the others are never drawn.
  for (double draw = 0; draw < 1; draw += 0.01) {
    const int64_t token = choose_token(kLogits, {.temperature = 1, .top_p = 0.7}, draw);
    EXPECT_TRUE(token == 1 || token == 3) << draw;
  }
  EXPECT_EQ(choose_token(kLogits, {.temperature = 1, .top_p = 1e-9}, 0.999), 1);
}

ModelConfig small_model() {
  return LlamaConfig{.vocab_size = 257,
                     .hidden_size = 16,
                     .num_hidden_layers = 1,
                     .num_attention_heads = 2,
                     .num_key_value_heads = 1,
                     .intermediate_size = 24,
                     .max_position_embeddings = 64,
                     .initializer_range = 0.5};
}

std::string text_of_ranks(int ranks, const SamplingOptions& options) {
  std::vector<std::string> texts(static_cast<size_t>(ranks));
  run_threads(ranks, {}, [&](World& world) {
    const Mesh mesh = world.mesh();
    const std::shared_ptr<LanguageModel> model = build_language_model(small_model(), {.seed = 5});
    const Sharded sharded = fully_shard(std::static_pointer_cast<torch::nn::Module>(model), mesh);
    const auto tokenizer = open_tokenizer(kByteTokenizerName);
    texts[static_cast<size_t>(world.rank())] =
        tokenizer->next_text(generate(*model, tokenizer->encode_prompt("ab"), options, c10::kCPU));
  });
  for (const std::string& text : texts) EXPECT_EQ(text, texts.front());
  return texts.front();
}

TEST(Generate, AllRanksWriteTheSameWhateverTheirNumber) {
  const SamplingOptions drawn{.max_tokens = 24, .temperature = 1, .seed = 3};
  const std::string alone = text_of_ranks(1, drawn);
  EXPECT_EQ(text_of_ranks(2, drawn), alone);
  EXPECT_EQ(text_of_ranks(3, drawn), alone);
  EXPECT_NE(text_of_ranks(1, {.max_tokens = 24, .temperature = 1, .seed = 4}), alone);
}

// Greedily, the whole context anew for each token.
std::vector<int64_t> written_without_cache(LanguageModel& model, std::vector<int64_t> text,
                                           int64_t num_tokens, size_t max_context) {
  const at::NoGradGuard no_grad;
  const size_t begin = text.size();
  for (int64_t i = 0; i < num_tokens; ++i) {
    const auto shown = static_cast<int64_t>(std::min(text.size(), max_context));
    const at::Tensor tokens = at::tensor(text).narrow(0, text.size() - shown, shown).unsqueeze(0);
    text.push_back(model.logits(tokens).select(1, -1).argmax().item<int64_t>());
  }
  return {text.begin() + static_cast<int64_t>(begin), text.end()};
}

TEST(Generate, WritesWhatTheWholeTextSaysOfEachNextToken) {
  const std::vector<int64_t> prompt = {7, 200, 31};
  for (const char* name : {"tiny", "moe-tiny", "hybrid-tiny", "delta-tiny", "mla-tiny"}) {
    const auto model = build_language_model(find_preset(name)->config, {.seed = 3});
    EXPECT_EQ(generate(*model, prompt, {.max_tokens = 24}, c10::kCPU),
              written_without_cache(*model, prompt, 24, 1024))
        << name;
  }
}

TEST(Generate, AContextThatIsTooLongForgetsItsBeginning) {
  const auto model = build_language_model(small_model(), {.seed = 5});
  const std::vector<int64_t> prompt = {97, 98};
  EXPECT_EQ(generate(*model, prompt, {.max_tokens = 20, .max_context = 8}, c10::kCPU),
            written_without_cache(*model, prompt, 20, 8));
}

}  // namespace
}  // namespace fsdp::train::text_generation_test
