// plan/: what a token costs, counted by hand.
#include "fsdp/plan/flops.h"

#include <gtest/gtest.h>

#include "fsdp/plan/model_tensors.h"
#include "support/config_examples.h"

namespace fsdp::flops_test {
namespace {

using testing::deepseek;
using testing::hybrid;
using testing::llama;
using testing::qwen3_next;

// Six per weight that is multiplied; attention counted by hand.
TEST(Flops, AreSixPerMultipliedWeightAndAttention) {
  const auto weights_without_embedding = [](const ModelConfig& config, int64_t num_norms) {
    return static_cast<double>(build_model("m", config).parameters() - 100 * 48 - num_norms * 48);
  };
  const auto attention = [](int64_t layers, double sequence) {
    return static_cast<double>(layers) * 2.0 * 48.0 * (sequence + 1.0) / 2.0;
  };
  EXPECT_EQ(flops_per_token(llama(), 63),
            6 * (weights_without_embedding(llama(), 7) + attention(3, 63)));
  LlamaConfig windowed = llama();
  windowed.sliding_window = 4;  // seven positions see 1, 2, 3, 4, 4, 4 and 4
  EXPECT_DOUBLE_EQ(flops_per_token(windowed, 7),
                   6 * (weights_without_embedding(windowed, 7) + 3 * 2.0 * 48.0 * 22.0 / 7.0));
  LlamaConfig predicting = llama();
  predicting.num_nextn_predict_layers = 1;  // its head is the same matrix, multiplied again
  EXPECT_EQ(flops_per_token(predicting, 63),
            6 * (weights_without_embedding(predicting, 7 + 5) + 100 * 48 + attention(4, 63)));
  const MixtralConfig experts{llama(), 5, 2, 0.0, 10};
  const double idle = 3.0 * 3 * 3 * 77 * 48;  // three of five experts, three matrices, three layers
  EXPECT_EQ(flops_per_token(experts, 63),
            6 * (weights_without_embedding(experts, 7) - idle + attention(3, 63)));
  // Per Mamba layer no product has A_log, D, dt_bias, the norm and the biases of the convolution.
  const double unused = 2.0 * (3 * 4 + 32 + 96);
  const double scan = 2.0 * (63 * 2 * 16 + 63 * 32 + 2 * 32 * 16);
  EXPECT_EQ(flops_per_token(hybrid(), 63),
            6 * (weights_without_embedding(hybrid(), 5) - unused + scan + attention(1, 63)));
}

// A frozen weight is multiplied once in the backward, for the gradient of its input.
TEST(Flops, AreFourPerFrozenWeightUnderAdapters) {
  const ModelConfig config = llama();
  const double whole = flops_per_token(config, 63);
  const double attention = 6 * 3 * 2.0 * 48.0 * (63 + 1.0) / 2.0;
  const double adapters = 6 * 3 * 5.0 * (48 + 77 + 77 + 48 + 48 + 77);  // of the MLPs
  EXPECT_DOUBLE_EQ(flops_per_token(config, 63, {.rank = 5, .on = {"*.mlp.*"}}),
                   (whole - attention) * 4 / 6 + attention + adapters);
}

// Six per weight that is multiplied; attention counted by hand.
TEST(Flops, OfLatentAttentionAreThoseOfItsProducts) {
  DeepseekV3Config direct = deepseek();
  direct.q_lora_rank = 0;
  DeepseekV3Config predicting = deepseek();
  predicting.decoder.num_nextn_predict_layers = 1;
  for (const DeepseekV3Config& config : {deepseek(), direct, predicting}) {
    const int64_t further = config.decoder.num_nextn_predict_layers;
    const int64_t layers = 3 + further;
    const int64_t norms = layers * (2 * 48 + config.q_lora_rank + 16) + 48 + further * 3 * 48;
    // Five of eight experts are not chosen; the head is multiplied once more for a further token.
    const int64_t idle = (layers - 1) * 5 * 3 * 14 * 48;
    const int64_t weights =
        build_model("m", config).parameters() - norms - 100 * 48 - idle + further * 100 * 48;
    const double attention = static_cast<double>(layers * 6 * (20 + 10)) * 64.0 / 2.0;
    EXPECT_EQ(flops_per_token(config, 63), 6.0 * (static_cast<double>(weights) + attention));
  }
}

TEST(Flops, CountTheProductsOfTheDeltaRule) {
  // No product has the embedding, the norms of layers, heads and mixers, and what decays.
  const int64_t unused = 100 * 48 + 7 * 48 + 2 * 8 + 2 * (12 + 2 * 4);
  const int64_t idle = 3 * 3 * 3 * 20 * 48;  // three of five experts, three matrices, three layers
  const auto weights =
      static_cast<double>(build_model("m", qwen3_next()).parameters() - unused - idle);
  const double attention = 2.0 * 48 * (63 + 1) / 2.0;
  const double overlaps = 2.0 * 63 * 2 * 8;
  const double within = 4 * 63 * (63 / 2.0 + 8 + 2 * 12);
  const double states = 4 * (8 * 8 + 8 * 8 * 12 / 63.0 + 3 * 8 * 12);
  EXPECT_NEAR(flops_per_token(qwen3_next(), 63),
              6 * (weights + attention + 2 * (overlaps + within + states)), 1e-3);
}

}  // namespace
}  // namespace fsdp::flops_test
