// Layers keep for their backward what plans say, where the host keeps the same as a device.
#include "fsdp/plan/activations.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "fsdp/comm/operation.h"
#include "fsdp/comm/world.h"
#include "fsdp/nn/config/presets.h"
#include "fsdp/nn/language_model.h"
#include "fsdp/nn/layers/experts.h"
#include "fsdp/nn/layers/gated_delta_net.h"
#include "fsdp/nn/layers/mamba2.h"
#include "fsdp/shard/fully_shard.h"
#include "support/allocation_log.h"
#include "support/small_models.h"

namespace fsdp::nn::activations_test {
namespace {

using fsdp::testing::AllocationLog;

constexpr int64_t kTokens = 512;

struct Measured {
  double kept = 0;  // bytes that a forward leaves beside its output
  double peak = 0;  // the most of its backward, beside output and input gradients
};

Measured measured(const std::vector<at::Tensor>& inputs,
                  const std::function<at::Tensor()>& forward) {
  const AllocationLog log(AllocationLog::Of::kHost);
  const at::Tensor output = forward();
  Measured result;
  const auto output_bytes = static_cast<double>(output.nbytes());
  result.kept = static_cast<double>(log.bytes()) - output_bytes;
  const at::Tensor gradient = at::ones_like(output);
  double gradients = 2 * output_bytes;
  for (const at::Tensor& input : inputs) gradients += static_cast<double>(input.nbytes());
  output.backward(gradient);
  result.peak = static_cast<double>(log.peak_bytes()) - gradients;
  return result;
}

double planned(const std::vector<KeptTensor>& kept, int64_t tokens = kTokens) {
  double bytes = 0;
  for (const KeptTensor& tensor : kept)
    bytes += static_cast<double>(tokens * tensor.elements_per_token * tensor.element_bytes);
  return bytes;
}

at::Tensor input_of(at::IntArrayRef shape, at::ScalarType type = at::kFloat) {
  return at::rand(shape, type).set_requires_grad(true);
}

TEST(Activations, OfExpertsAreThosePlanned) {
  for (const MlpKind kind : {MlpKind::kGatedSilu, MlpKind::kSquaredRelu}) {
    const bool is_gated = kind == MlpKind::kGatedSilu;
    Experts experts(ExpertsOptions{.router = {.hidden_size = 64, .num_experts = 8, .num_chosen = 2},
                                   .intermediate_size = 96,
                                   .kind = kind,
                                   .shared_size = 80,
                                   .is_shared_gated = is_gated});
    experts->to(at::kBFloat16);
    const at::Tensor x = input_of({1, kTokens, 64}, at::kBFloat16);
    const double kept = planned(experts_activations({.intermediate = 96,
                                                     .experts = 8,
                                                     .chosen = 2,
                                                     .shared = 80,
                                                     .is_gated = is_gated,
                                                     .is_shared_gated = is_gated},
                                                    64, {})
                                    .kept);
    const Measured actual = measured({x}, [&] { return experts(x).output; });
    // Routers' figures of all experts, and rows' ends, are a few bytes more.
    EXPECT_NEAR(actual.kept, kept, 0.02 * kept) << (is_gated ? "gated" : "squared");
  }
}

TEST(Activations, OfTheSelectiveScanAreThosePlanned) {
  const NemotronHConfig config{.hybrid_override_pattern = "M",
                               .mamba_num_heads = 8,
                               .mamba_head_dim = 16,
                               .n_groups = 2,
                               .ssm_state_size = 32,
                               .chunk_size = 64};
  const std::vector<at::Tensor> inputs = {
      input_of({1, kTokens, 8, 16}), input_of({1, kTokens, 8}),     input_of({8}),
      input_of({1, kTokens, 2, 32}), input_of({1, kTokens, 2, 32}), input_of({8})};
  const Measured actual = measured(inputs, [&] {
    return selective_scan({.x = inputs[0],
                           .step = inputs[1],
                           .a = -inputs[2],
                           .b = inputs[3],
                           .c = inputs[4],
                           .d = inputs[5]},
                          config.chunk_size);
  });
  const BlockActivations plan = scan_activations(config, {});
  EXPECT_NEAR(actual.kept, planned(plan.kept), 0.05 * planned(plan.kept));
  const double peak = planned(plan.kept) + static_cast<double>(plan.working_bytes(kTokens));
  EXPECT_NEAR(actual.peak, peak, 0.15 * peak);
}

TEST(Activations, OfTheDeltaRuleAreThosePlanned) {
  const Qwen3NextConfig config{.decoder = {},
                               .linear_num_key_heads = 2,
                               .linear_num_value_heads = 4,
                               .linear_key_head_dim = 32,
                               .linear_value_head_dim = 32};
  const std::vector<at::Tensor> inputs = {
      input_of({1, kTokens, 2, 32}), input_of({1, kTokens, 2, 32}), input_of({1, kTokens, 4, 32}),
      input_of({1, kTokens, 4}), input_of({1, kTokens, 4})};
  double given = 0;  // the table has the rule's inputs, too
  for (const at::Tensor& input : inputs) given += static_cast<double>(input.nbytes());
  const at::Tensor key = (inputs[1] / 32).detach().set_requires_grad(true);
  const at::Tensor decay = (-inputs[3]).detach().set_requires_grad(true);
  const Measured actual = measured(inputs, [&] {
    return gated_delta_rule(
        {.query = inputs[0], .key = key, .value = inputs[2], .log_decay = decay, .beta = inputs[4]},
        64);
  });
  const BlockActivations plan = delta_rule_activations(config, {});
  const double kept = planned(plan.kept) - given;
  const double states =
      2.0 * 4 * 32 * 32 * 4;  // the first and the last one, beside those of chunks
  EXPECT_NEAR(actual.kept, kept + states, 0.05 * planned(plan.kept));
  const double peak = kept + static_cast<double>(plan.working_bytes(kTokens));
  EXPECT_NEAR(actual.peak, peak, 0.15 * peak);
}

// --- whole models on the ranks of a tp group -----------------------------------------------------

LlamaConfig llama() {
  return {.vocab_size = 96,
          .hidden_size = 48,
          .num_hidden_layers = 2,
          .num_attention_heads = 4,
          .num_key_value_heads = 2,
          .head_dim = 16,
          .intermediate_size = 112};
}

std::vector<testing::SmallModel> models() {
  LlamaConfig uneven = llama();
  uneven.vocab_size = 97;  // ranks have their own tokens at the ends
  LlamaConfig normed = llama();
  normed.qk_norm = true;
  LlamaConfig predicting = llama();
  predicting.num_nextn_predict_layers = 2;
  // A dense block, one of experts, and one that predicts.
  auto mla = std::get<DeepseekV3Config>(find_preset("mla-tiny")->config);
  mla.decoder.num_hidden_layers = 2;
  DeepseekV3Config direct = mla;  // queries in one step, values as long as keys
  direct.q_lora_rank = 0;
  direct.v_head_dim = query_head_dim_of(mla);
  DeepseekV3Config long_values = direct;
  long_values.v_head_dim = query_head_dim_of(mla) + 8;
  auto experts = std::get<MixtralConfig>(find_preset("moe-tiny")->config);
  experts.decoder.num_hidden_layers = 1;
  return {{"llama", llama()},
          {"uneven", uneven},
          {"qk_norm", normed},
          {"predicting", predicting},
          {"mla", mla},
          {"mla_direct", direct},
          {"mla_long_values", long_values},
          {"experts", experts}};
}

// Bytes of one rank that a loss leaves for its backward. Its collectives move nothing: threads
// that move something release memory behind the log's back.
double kept_of_loss(const ModelConfig& config, int64_t rows, int64_t sequence, int tp) {
  World world = World::simulated(0, tp, std::make_shared<Recording>());
  const Mesh mesh = world.mesh({.tp = tp});
  const std::shared_ptr<LanguageModel> model = build_language_model(config, {.seed = 3});
  Sharded sharded = fully_shard(model, mesh, {});
  const at::Tensor tokens = at::randint(vocab_size_of(config), {rows, sequence}, at::kLong);
  model->loss(tokens, tokens).total.backward();  // tables of positions are made
  const AllocationLog log(AllocationLog::Of::kHost);
  const ModelLoss loss = model->loss(tokens, tokens);
  const auto kept = static_cast<double>(log.bytes());
  loss.total.backward();
  return kept;
}

double planned_of_loss(const ModelConfig& config, int64_t rows, int64_t sequence, int64_t tp) {
  const ModelLayers layers = layers_of(config);
  const ModelActivations plan = *activations_of(
      config, {.compute = DType::kFloat32, .tp = tp, .rows = rows, .sequence = sequence});
  const int64_t parts = plan.vocab_size % tp == 0 ? tp : 1;
  int64_t tokens = rows * sequence / tp;
  double kept = 0;
  const auto add_head = [&] {
    kept += planned(kept_by_head(plan.hidden_size, DType::kFloat32), tokens) +
            static_cast<double>(plan.vocab_size / parts * plan.hidden_size * 4);
  };
  for (size_t i = 0; i < plan.blocks.size(); ++i) {
    if (i == layers.blocks.size()) add_head();
    const bool is_main = i < layers.blocks.size();
    // Alone, a rank leaves out the places without a later token.
    if (!is_main && layers.predictions[i - layers.blocks.size()].joins_embedding && tp == 1)
      tokens -= rows;
    kept += planned(plan.blocks[i].kept, tokens);
    if (!is_main && !layers.predictions[i - layers.blocks.size()].head_norm.empty()) add_head();
  }
  if (layers.predictions.empty()) add_head();
  return kept;
}

TEST(Activations, OfModelsAreThosePlannedOnTheRanksOfATensorGroup) {
  for (const testing::SmallModel& model : models())
    for (const int tp : {1, 2})
      for (const int64_t rows : {1, 2}) {
        const double plan = planned_of_loss(model.config, rows, 64, tp);
        const double kept = kept_of_loss(model.config, rows, 64, tp);
        EXPECT_NEAR(kept, plan, 0.005 * plan) << model.name << ", tp " << tp << ", rows " << rows;
      }
}

// Mixers of hybrids are computed in fp32 whatever the type, for which the table has copies that a
// host in fp32 does not make; but ranks have equal parts of them.
TEST(Activations, OfHybridsAreSharedByTheRanksOfATensorGroup) {
  auto hybrid = std::get<NemotronHConfig>(find_preset("hybrid-moe-tiny")->config);
  hybrid.hybrid_override_pattern = "ME*";
  auto delta_net = std::get<Qwen3NextConfig>(find_preset("delta-tiny")->config);
  delta_net.decoder.num_hidden_layers = 1;
  delta_net.linear_num_key_heads = delta_net.linear_num_value_heads = 4;
  for (const ModelConfig& config : {ModelConfig(hybrid), ModelConfig(delta_net)}) {
    const double alone = kept_of_loss(config, 1, 64, 1);
    EXPECT_NEAR(kept_of_loss(config, 2, 64, 2), alone, 0.01 * alone);
  }
}

}  // namespace
}  // namespace fsdp::nn::activations_test
