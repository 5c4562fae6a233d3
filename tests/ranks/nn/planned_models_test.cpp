// The forecast of `fsdp plan` for models with ep and tp axes is what the engine takes and moves, to
// the byte.
#include <gtest/gtest.h>

#include <map>
#include <string>
#include <utility>
#include <vector>

#include "fsdp/base/text.h"
#include "fsdp/comm/operation.h"
#include "fsdp/nn/language_model.h"
#include "fsdp/plan/forecast.h"
#include "fsdp/plan/model_adapters.h"
#include "fsdp/plan/model_tensors.h"
#include "support/counting_allocator.h"
#include "support/one_in.h"
#include "support/sharded_training.h"
#include "support/small_models.h"

namespace fsdp::planned_models_test {
namespace {

struct Case {
  std::string name;
  ModelConfig config;
  int ranks;
  MeshOptions mesh;
  Quantization quantization = {};
  LoraOptions lora = {};
};

MixtralConfig mixtral(int64_t num_predictions) {
  MixtralConfig config = testing::small_mixtral();
  config.num_local_experts = 8;
  config.shared_expert_intermediate_size = 11;
  config.decoder.num_nextn_predict_layers = num_predictions;
  config.decoder.intermediate_size = 30;
  return config;
}

// A vocabulary of 36 can be shared by two ranks, one of 37 cannot.
LlamaConfig llama(int64_t vocab_size, bool biased) {
  LlamaConfig config = testing::small_llama();
  config.vocab_size = vocab_size;
  config.intermediate_size = 30;
  config.attention_bias = config.mlp_bias = biased;
  return config;
}

NemotronHConfig hybrid(bool biased) {
  NemotronHConfig config = testing::small_hybrid();
  config.intermediate_size = 30;
  config.use_bias = config.attention_bias = config.mlp_bias = biased;
  return config;
}

NemotronHConfig expert_hybrid(int64_t latent_size) {
  NemotronHConfig config = testing::small_expert_hybrid();
  config.intermediate_size = 30;
  config.moe_latent_size = latent_size;
  config.tie_word_embeddings = config.mlp_bias = latent_size > 0;
  return config;
}

Qwen3NextConfig next() {
  Qwen3NextConfig config = testing::small_qwen3_next();
  config.num_experts = 8;
  return config;
}

DeepseekV3Config deepseek(int64_t q_lora_rank) {
  DeepseekV3Config config = testing::small_deepseek();
  config.decoder.intermediate_size = 30;
  config.decoder.attention_bias = config.decoder.tie_word_embeddings = q_lora_rank == 0;
  config.q_lora_rank = q_lora_rank;
  return config;
}

// Has sizes that blocks of every recipe divide, on two tp ranks, too.
MixtralConfig quantized_mixtral() {
  MixtralConfig config = mixtral(1);
  config.decoder.hidden_size = 64;
  config.decoder.head_dim = 16;
  config.decoder.intermediate_size = config.shared_expert_intermediate_size = 64;
  return config;
}

std::vector<Case> quantized_cases() {
  std::vector<Case> all;
  for (const WeightRecipeRow& row : all_weight_recipes())
    for (const MeshOptions& mesh : {MeshOptions{}, {.outer = 2, .ep = 4, .tp = 2}})
      all.push_back(
          {concat(row.name, " mixtral"), quantized_mixtral(), 4, mesh, {.recipe = row.recipe}});
  all.push_back({"partly plain mixtral",
                 quantized_mixtral(),
                 4,
                 {.outer = 2},
                 {.recipe = WeightRecipe::kFp8Row, .except = {"model.layers.0.*", "*.q_proj.*"}}});
  return all;
}

std::vector<Case> cases() {
  std::vector<Case> all = quantized_cases();
  const auto add = [&](const std::string& name, const ModelConfig& config,
                       std::initializer_list<MeshOptions> meshes) {
    for (const MeshOptions& mesh : meshes) all.push_back({name, config, 4, mesh});
  };
  const MeshOptions every_axis{.outer = 2, .ep = 4, .tp = 2};
  add("mixtral", mixtral(1),
      {{}, {.ep = 2}, {.ep = 4}, {.outer = 2, .ep = 2}, {.tp = 2}, {.ep = 2, .tp = 2}, every_axis});
  add("mixtral without predictions", mixtral(0), {{.ep = 2, .tp = 2}});
  LlamaConfig qwen2 = llama(38, false);
  qwen2.family = LlamaFamily::kQwen2;
  LlamaConfig tied = llama(38, false);
  tied.tie_word_embeddings = true;
  LlamaConfig tied_predicting = tied;
  tied_predicting.num_nextn_predict_layers = 2;
  add("llama", llama(38, false), {{.tp = 2}, {.outer = 2, .tp = 2}});
  add("biased llama", llama(37, true), {{.tp = 2}, {.outer = 2, .tp = 2}});
  add("qwen2", qwen2, {{.tp = 2}});
  add("tied llama", tied, {{.outer = 2, .tp = 2}});
  add("tied llama with predictions", tied_predicting, {{.tp = 2}, {.outer = 2, .tp = 2}});
  add("hybrid", hybrid(false), {{.outer = 2, .tp = 2}});
  add("biased hybrid", hybrid(true), {{.tp = 2}});
  for (const int64_t size : {0, 10}) {
    add("hybrid with experts", expert_hybrid(size), {{.ep = 4}, every_axis});
    add("deepseek", deepseek(size), {{}, {.ep = 2, .tp = 2}, every_axis});
  }
  add("qwen3-next", next(), {{}, {.ep = 4}, every_axis});
  const LoraOptions adapters{.rank = 3, .on = {"*_proj"}};
  all.push_back({"adapted qwen2", qwen2, 4, {.outer = 2}, {}, adapters});
  all.push_back({"adapted mixtral", mixtral(0), 4, {.ep = 2}, {}, adapters});
  all.push_back({"adapted hybrid", hybrid(true), 4, {}, {}, adapters});
  all.push_back({"adapted mixtral of codes",
                 quantized_mixtral(),
                 4,
                 {.outer = 2},
                 {.recipe = WeightRecipe::kFp8Row, .frozen = true},
                 adapters});
  return all;
}

std::string text(const Case& each, const Strategy& strategy) {
  return concat(each.name, ", ", to_text(strategy), ", ", each.ranks, " ranks, outer ",
                each.mesh.outer, ", ep ", each.mesh.ep, ", tp ", each.mesh.tp);
}

Forecast forecast_of(const Case& each, const ShardOptions& options) {
  const PlanOptions plan{.ranks = each.ranks,
                         .outer = each.mesh.outer,
                         .ep = each.mesh.ep,
                         .tp = each.mesh.tp,
                         .compute = DType::kFloat32,
                         .precision = options.precision.types(),
                         .weights = each.quantization.recipe,
                         .weights_except = each.quantization.except,
                         .pool = options.pool,
                         .other_units = options.other_units,
                         .prefetch = options.prefetch,
                         .granularity = options.granularity};
  ModelShape model = build_model(each.name, each.config);
  add_adapters(model, each.lora);
  return Planner(std::move(model), plan).forecast(options.strategy);
}

// The plan refuses to shard an axis of one rank.
bool is_planned(const Case& each, const Strategy& strategy) {
  return each.mesh.outer > 1 || strategy.optimizer.outer != Placement::kShard;
}

void step(LanguageModel& model, const Sharded& sharded, int loss, int number) {
  testing::small_loss(model, testing::small_tokens(loss, number, 2, 8)).total.backward();
  sharded.wait_gradients();
  sharded.refresh_weights();
  sharded.zero_grad();
}

TEST(PlannedModels, TakeTheMemoryThatIsForecast) {
  testing::OneIn few(5);
  for (const Case& each : cases())
    for (const Strategy& strategy : named_strategies()) {
      if (!is_planned(each, strategy) || few.skips()) continue;
      SCOPED_TRACE(text(each, strategy));
      ShardOptions options{.strategy = strategy, .quantization = each.quantization};
      options.precision.grad_comm = at::kBFloat16;
      const MemoryBytes forecast = forecast_of(each, options).bytes;
      testing::run_ranks(each.ranks, [&](World& world) {
        const Mesh mesh = world.mesh(each.mesh);
        testing::CountingHostAllocator allocator;
        ShardOptions counted = options;
        counted.allocator = &allocator;
        const auto model = build_language_model(each.config, {.seed = 3, .lora = each.lora});
        const Sharded sharded = fully_shard(model, mesh, counted);
        sharded.drop_frozen_numbers();
        const MemoryReport at_rest = sharded.memory();
        EXPECT_EQ(at_rest.weight_bytes, forecast.weight);
        EXPECT_EQ(at_rest.main_grad_bytes, forecast.main_grad);
        for (int number = 0; number < 3; ++number) {
          allocator.restart_peak();
          step(*model, sharded, mesh.data_parallel_rank(), number);
          EXPECT_EQ(allocator.peak_bytes(), forecast.total()) << "step " << number;
        }
      });
    }
}

// Blocks are unlike the embedding and the head.
TEST(PlannedModels, TakeTheMemoryThatIsForecastOfADoubleBuffer) {
  const Case each{"llama", llama(38, false), 2, {}};
  for (const OtherUnits others : {OtherUnits::kOnDemand, OtherUnits::kPersistent}) {
    const ShardOptions options{.pool = PoolKind::kDoubleBuffer, .other_units = others};
    const int64_t forecast = forecast_of(each, options).bytes.total();
    testing::run_ranks(each.ranks, [&](World& world) {
      const Mesh mesh = world.mesh();
      testing::CountingHostAllocator allocator;
      ShardOptions counted = options;
      counted.allocator = &allocator;
      const auto model = build_language_model(each.config, {.seed = 3});
      const Sharded sharded = fully_shard(model, mesh, counted);
      for (int number = 0; number < 3; ++number) {
        allocator.restart_peak();
        step(*model, sharded, mesh.data_parallel_rank(), number);
        EXPECT_EQ(allocator.peak_bytes(), forecast) << "step " << number;
      }
    });
  }
}

const std::vector<std::pair<std::string, AxisTraffic Traffic::*>>& axes() {
  static const std::vector<std::pair<std::string, AxisTraffic Traffic::*>> all = {
      {"inner", &Traffic::inner},
      {"outer", &Traffic::outer},
      {"tensor inner", &Traffic::tensor_inner},
      {"expert inner", &Traffic::expert_inner},
      {"expert outer", &Traffic::expert_outer}};
  return all;
}

// The bytes that this rank receives for weights and gradients, by axis.
Traffic traffic_of(const Recording& calls) {
  Traffic sum;
  for (const RecordedCall& call : calls)
    for (const auto& [name, axis] : axes()) {  // tokens are on their way over others
      if (call.communicator.substr(0, call.communicator.rfind(' ')) != name) continue;
      const int64_t received = call.print.bytes - call.print.bytes / call.ranks;
      AxisTraffic& moved = sum.*axis;
      if (call.print.kind == OpKind::kAllGather) moved.all_gather += received;
      if (call.print.kind == OpKind::kReduceScatter) moved.reduce_scatter += received;
      if (call.print.kind == OpKind::kAllReduce) moved.all_reduce += 2 * received;
    }
  return sum;
}

// On as many ranks as nobody has threads for.
std::vector<Case> wide_cases() {
  MixtralConfig qwen = mixtral(0);
  qwen.decoder.qk_norm = true;
  qwen.shared_expert_intermediate_size = 0;
  return {{"mixtral", mixtral(1), 8, {.ep = 8}},
          {"qwen3-moe", qwen, 64, {.outer = 8, .ep = 8}},
          {"hybrid with experts", expert_hybrid(10), 512, {.outer = 64, .ep = 8, .tp = 2}},
          {"qwen3-next", next(), 4096, {.outer = 64, .ep = 4, .tp = 2}}};
}

// Nothing moves in a simulated world, so values mean nothing: only calls do.
TEST(PlannedModels, MoveTheBytesThatAreForecast) {
  std::vector<Case> all = cases();
  for (Case& wide : wide_cases()) all.push_back(std::move(wide));
  testing::OneIn few(5);
  for (const Case& each : all)
    for (const Strategy& strategy : named_strategies()) {
      if (!is_planned(each, strategy) || few.skips()) continue;
      SCOPED_TRACE(text(each, strategy));
      const ShardOptions options{.strategy = strategy, .quantization = each.quantization};
      const auto recording = std::make_shared<Recording>();
      World world = World::simulated(0, each.ranks, recording);
      const Mesh mesh = world.mesh(each.mesh);
      const auto model = build_language_model(each.config, {.seed = 3, .lora = each.lora});
      const Sharded sharded = fully_shard(model, mesh, options);
      for (int number = 0; number < 3; ++number) {  // the order is known from the second on
        recording->clear();
        step(*model, sharded, 0, number);
      }
      const Traffic actual = traffic_of(*recording);
      const Traffic expected = forecast_of(each, options).traffic;
      for (const auto& [name, axis] : axes()) {
        EXPECT_EQ((actual.*axis).all_gather, (expected.*axis).all_gather) << name;
        EXPECT_EQ((actual.*axis).reduce_scatter, (expected.*axis).reduce_scatter) << name;
        EXPECT_EQ((actual.*axis).all_reduce, (expected.*axis).all_reduce) << name;
      }
    }
}

}  // namespace
}  // namespace fsdp::planned_models_test
