#include "fsdp/plan/activations.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "fsdp/base/integer.h"

namespace fsdp {

namespace {

// libtorch's allocator gives out multiples of this.
constexpr int64_t kAllocatorBlock = 512;
constexpr int64_t kFactorBytes = 4;  // of norms, and of attention's sums
constexpr int64_t kWide = 4;         // fp32, in which scans compute whatever the model does
constexpr int64_t kWidest = 8;       // fp64, and indices
constexpr int64_t kCodeBytes = 1;    // of fp8
constexpr int64_t kScaleBytes = 4;
constexpr int64_t kDeltaRuleChunk = 64;  // GatedDeltaNetOptions

void append(std::vector<KeptTensor>& to, const std::vector<KeptTensor>& more) {
  to.insert(to.end(), more.begin(), more.end());
}

int64_t per_token_bytes(std::span<const KeptTensor> kept) {
  int64_t sum = 0;
  for (const KeptTensor& tensor : kept) sum += tensor.elements_per_token * tensor.element_bytes;
  return sum;
}

// The bytes kept of a linear layer's input that nobody else keeps.
std::vector<KeptTensor> kept_input(const char* what, int64_t width, const ActivationOptions& o) {
  if (!o.keeps_codes) return {{what, width, element_bytes(o.compute)}};
  return {{what, width, kCodeBytes}, {"scales of its codes", 1, kScaleBytes}};
}

// The same, of an input that is kept anyway.
std::vector<KeptTensor> kept_codes(const char* what, int64_t width, const ActivationOptions& o) {
  return o.keeps_codes ? kept_input(what, width, o) : std::vector<KeptTensor>{};
}

std::vector<KeptTensor> kept_by_norm(int64_t hidden, int64_t element) {
  return {{"what is normed", hidden, element}, {"its norm's factors", 1, kFactorBytes}};
}

// The input of parts with a layer that is not quantised, like a router.
std::vector<KeptTensor> kept_numbers(int64_t hidden, int64_t element) {
  return {{"normed", hidden, element}};
}

struct AttentionWidths {
  int64_t hidden, queries, keys, heads, kv_heads;
  bool qk_norm = false;
  bool is_gated = false;
};

BlockActivations attention_activations(const AttentionWidths& w, const ActivationOptions& options) {
  const int64_t element = element_bytes(options.compute);
  BlockActivations attention{.kept = {{"queries, rotated", w.queries, element},
                                      {"keys, rotated", w.keys, element},
                                      {"values", w.keys, element},
                                      {"what attention returns", w.queries, element},
                                      {"logarithms of its sums", w.heads, kFactorBytes}},
                             .moments = {},
                             .input = kept_input("normed", w.hidden, options)};
  if (w.qk_norm)
    append(attention.kept, {{"queries before their norm", w.queries, element},
                            {"keys before theirs", w.keys, element},
                            {"factors of both", w.heads + w.kv_heads, kFactorBytes}});
  if (w.is_gated) attention.kept.push_back({"gates", w.queries, element});
  const std::vector<KeptTensor> by_output =
      w.is_gated ? kept_input("gated", w.queries, options)
                 : kept_codes("the same as codes", w.queries, options);
  append(attention.kept, by_output);
  // The gradients of queries, keys and values, with the fp32 sums of the former, where codes of the
  // last layer's input are gone.
  attention.moments = {{.per_token = element * (w.hidden + 4 * w.queries) +
                                     kFactorBytes * (w.queries + w.heads) -
                                     (options.keeps_codes ? per_token_bytes(by_output) : 0)}};
  return attention;
}

// The gradients of the product, and of gate and up (or of what is squared), where the product is
// gone.
enum class Mlp : uint8_t { kGated, kSquared };
BlockActivations mlp_activations(Mlp kind, int64_t hidden, int64_t intermediate,
                                 const ActivationOptions& options) {
  const int64_t element = element_bytes(options.compute);
  const bool is_gated = kind == Mlp::kGated;
  const std::vector<KeptTensor> product =
      kept_input(is_gated ? "their product" : "its square", intermediate, options);
  BlockActivations mlp{
      .kept = {{is_gated ? "gate" : "what is above 0", intermediate, element}},
      .moments = {{.per_token = element * (hidden + 3 * intermediate) - per_token_bytes(product)}},
      .input = kept_input("normed", hidden, options)};
  if (is_gated) mlp.kept.push_back({"up", intermediate, element});
  append(mlp.kept, product);
  return mlp;
}

// A norm, a mixer behind it, and the same once more, whose tensors are gone when the mixer's
// backward begins; or one mixer alone.
BlockActivations block_of(int64_t hidden, int64_t element, const BlockActivations& mixer,
                          const BlockActivations* second = nullptr) {
  BlockActivations block{.kept = kept_by_norm(hidden, element), .moments = {}};
  append(block.kept, mixer.input);
  append(block.kept, mixer.kept);
  if (second == nullptr) {
    block.moments = mixer.moments;
    return block;
  }
  append(block.kept, kept_by_norm(hidden, element));
  append(block.kept, second->input);
  append(block.kept, second->kept);
  block.moments = second->moments;
  const int64_t gone = per_token_bytes(second->input) + per_token_bytes(second->kept);
  for (WorkingBytes moment : mixer.moments) {
    moment.per_token -= gone;
    block.moments.push_back(moment);
  }
  return block;
}

template <typename Config>
AttentionWidths attention_of(const Config& c) {
  const int64_t head_dim = head_dim_of(c);
  AttentionWidths widths{.hidden = c.hidden_size,
                         .queries = c.num_attention_heads * head_dim,
                         .keys = c.num_key_value_heads * head_dim,
                         .heads = c.num_attention_heads,
                         .kv_heads = c.num_key_value_heads};
  if constexpr (requires { c.qk_norm; }) widths.qk_norm = c.qk_norm;
  return widths;
}

int64_t positions_of(int64_t chunk, const ActivationOptions& options) {
  return options.sequence > 0 ? std::min(chunk, options.sequence) : chunk;
}

using Blocks = std::optional<std::vector<BlockActivations>>;

bool is_known(const LlamaConfig& c, const ActivationOptions& options) {
  const bool has_short_window = c.sliding_window > 0 && c.sliding_window < options.sequence;
  return c.num_nextn_predict_layers == 0 && !has_short_window;
}

Blocks blocks_of(const LlamaConfig& c, const ActivationOptions& options) {
  if (!is_known(c, options)) return std::nullopt;
  const int64_t element = element_bytes(options.compute);
  const BlockActivations mlp =
      mlp_activations(Mlp::kGated, c.hidden_size, c.intermediate_size, options);
  return std::vector(
      static_cast<size_t>(c.num_hidden_layers),
      block_of(c.hidden_size, element, attention_activations(attention_of(c), options), &mlp));
}

Blocks blocks_of(const MixtralConfig& c, const ActivationOptions& options) {
  const LlamaConfig& d = c.decoder;
  if (!is_known(d, options)) return std::nullopt;
  const int64_t element = element_bytes(options.compute);
  const BlockActivations experts =
      experts_activations({.hidden = d.hidden_size,
                           .tokens = d.hidden_size,
                           .intermediate = d.intermediate_size,
                           .experts = c.num_local_experts,
                           .chosen = c.num_experts_per_tok,
                           .shared = c.shared_expert_intermediate_size},
                          options);
  return std::vector(
      static_cast<size_t>(d.num_hidden_layers),
      block_of(d.hidden_size, element, attention_activations(attention_of(d), options), &experts));
}

BlockActivations mamba_activations(const NemotronHConfig& c, const ActivationOptions& options) {
  const int64_t element = element_bytes(options.compute);
  const int64_t inner = c.mamba_num_heads * c.mamba_head_dim;
  const int64_t convolved = inner + 2 * c.n_groups * c.ssm_state_size;
  BlockActivations mamba = scan_activations(c, options);
  mamba.input = kept_input("normed", c.hidden_size, options);
  append(mamba.kept, {{"gate, x, B, C and steps", inner + convolved + c.mamba_num_heads, element},
                      {"convolved", convolved, element},
                      {"x, B and C", convolved, kWide},
                      {"steps and what they are of", 3 * c.mamba_num_heads, kWide},
                      {"gate", inner, kWide},
                      {"what the scan returns", inner, kWide},
                      {"gated", inner, kWide},
                      {"its norm's factors", c.n_groups, kFactorBytes},
                      {"normed", inner, kWide}});
  append(mamba.kept, kept_input("the same, narrow", inner, options));
  return mamba;
}

Blocks blocks_of(const NemotronHConfig& c, const ActivationOptions& options) {
  if (c.num_nextn_predict_layers > 0) return std::nullopt;
  const int64_t element = element_bytes(options.compute);
  const auto mixer_of = [&](char kind) {
    if (kind == 'M') return mamba_activations(c, options);
    if (kind == '*') return attention_activations(attention_of(c), options);
    if (kind != 'E')
      return mlp_activations(Mlp::kSquared, c.hidden_size, c.intermediate_size, options);
    const int64_t latent = c.moe_latent_size;
    BlockActivations experts = experts_activations({.hidden = c.hidden_size,
                                                    .tokens = latent > 0 ? latent : c.hidden_size,
                                                    .intermediate = c.moe_intermediate_size,
                                                    .experts = c.n_routed_experts,
                                                    .chosen = c.num_experts_per_tok,
                                                    .shared = c.moe_shared_expert_intermediate_size,
                                                    .is_gated = false,
                                                    .has_sigmoid_router = true},
                                                   options);
    if (latent > 0) experts.kept.push_back({"what experts return", latent, element});
    return experts;
  };
  std::vector<BlockActivations> blocks;
  for (const char kind : c.hybrid_override_pattern)
    blocks.push_back(block_of(c.hidden_size, element, mixer_of(kind)));
  return blocks;
}

BlockActivations delta_net_activations(const Qwen3NextConfig& c, const ActivationOptions& options) {
  const int64_t element = element_bytes(options.compute);
  const int64_t keys = c.linear_num_key_heads * c.linear_key_head_dim;
  const int64_t values = c.linear_num_value_heads * c.linear_value_head_dim;
  BlockActivations net = delta_rule_activations(c, options);
  net.input = kept_numbers(c.decoder.hidden_size, element);
  append(net.kept, {{"queries, keys and values", 2 * keys + values, element},
                    {"the same, convolved", 2 * keys + values, element},
                    {"queries and keys of any length", 2 * keys, kWide},
                    {"their norm's factors", 2 * c.linear_num_key_heads, kFactorBytes},
                    {"what decays are of", 2 * c.linear_num_value_heads, kWide},
                    {"what the rule returns", values, kWide},
                    {"its norm's factors", c.linear_num_value_heads, kFactorBytes},
                    {"normed", values, kWide},
                    {"gate", values, kWide},
                    {"gated, narrow", values, element}});
  // Gone when the backward of the rule begins: what comes after it.
  for (WorkingBytes& moment : net.moments)
    moment.per_token -= 3 * values * kWide + values * element;
  return net;
}

Blocks blocks_of(const Qwen3NextConfig& c, const ActivationOptions& options) {
  const LlamaConfig& d = c.decoder;
  if (!is_known(d, options)) return std::nullopt;
  const int64_t element = element_bytes(options.compute);
  AttentionWidths attention = attention_of(d);
  attention.qk_norm = attention.is_gated = true;
  std::vector<BlockActivations> blocks;
  for (int64_t layer = 0; layer < d.num_hidden_layers; ++layer) {
    const BlockActivations mixer = layer_type_of(c, layer) == LayerType::kLinearAttention
                                       ? delta_net_activations(c, options)
                                       : attention_activations(attention, options);
    const BlockActivations mlp =
        has_experts(c, layer)
            ? experts_activations({.hidden = d.hidden_size,
                                   .tokens = d.hidden_size,
                                   .intermediate = c.moe_intermediate_size,
                                   .experts = c.num_experts,
                                   .chosen = c.num_experts_per_tok,
                                   .shared = c.shared_expert_intermediate_size,
                                   .is_shared_gated = true},
                                  options)
            : mlp_activations(Mlp::kGated, d.hidden_size, d.intermediate_size, options);
    blocks.push_back(block_of(d.hidden_size, element, mixer, &mlp));
  }
  return blocks;
}

Blocks blocks_of(const DeepseekV3Config& /*config*/, const ActivationOptions& /*options*/) {
  return std::nullopt;
}

// The model's two outer sizes.
const LlamaConfig& sizes_of(const LlamaConfig& c) { return c; }
const NemotronHConfig& sizes_of(const NemotronHConfig& c) { return c; }
const LlamaConfig& sizes_of(const auto& c) { return c.decoder; }

}  // namespace

double rows_per_token(int64_t chosen, int64_t experts, const ActivationOptions& options) {
  if (options.ep == 1) return static_cast<double>(chosen);
  const auto most = static_cast<double>(options.ep * std::min(chosen, experts / options.ep));
  if (options.expert_capacity == 0.0) return most;
  return std::min(most, options.expert_capacity * static_cast<double>(chosen));
}

int64_t kept_bytes(int64_t tokens, int64_t elements_per_token, int64_t element) {
  return round_up(checked_mul(checked_mul(tokens, elements_per_token), element), kAllocatorBlock);
}

int64_t kept_bytes(int64_t tokens, std::span<const KeptTensor> kept) {
  int64_t sum = 0;
  for (const KeptTensor& tensor : kept)
    sum = checked_add(sum, kept_bytes(tokens, tensor.elements_per_token, tensor.element_bytes));
  return sum;
}

int64_t BlockActivations::kept_bytes(int64_t tokens) const {
  return fsdp::kept_bytes(tokens, kept);
}

int64_t BlockActivations::working_bytes(int64_t tokens) const {
  int64_t most = 0;
  for (const WorkingBytes& moment : moments)
    most = std::max(most, checked_mul(tokens, moment.per_token) + moment.of_weights);
  return round_up(most, kAllocatorBlock);
}

std::vector<KeptTensor> kept_by_head(int64_t hidden_size, DType compute) {
  const int64_t element = element_bytes(compute);
  return {{"the last block's output", hidden_size, element},
          {"its norm's factors", 1, kFactorBytes},
          {"the gradient of what was normed", hidden_size, element}};
}

BlockActivations experts_activations(const ExpertWidths& w, const ActivationOptions& options) {
  const int64_t element = element_bytes(options.compute);
  const double rows = rows_per_token(w.chosen, w.experts, options);
  const auto in_rows = [&](int64_t width) {
    return static_cast<int64_t>(std::ceil(rows * static_cast<double>(width)));
  };
  const int64_t into = (w.is_gated ? 2 : 1) * w.intermediate;
  BlockActivations experts{
      .kept = {{"probabilities", w.experts, kWide},
               {"chosen weights, and their sum", w.chosen + 1, kWide},
               {"the same, narrow", w.chosen, element},
               {"choices, and where they went", 3 * w.chosen, kWidest},
               {"rows of experts", in_rows(w.tokens), element},
               {w.is_gated ? "gate and up" : "what is above 0", in_rows(into), element},
               {w.is_gated ? "their product" : "its square", in_rows(w.intermediate), element},
               {"what experts return", in_rows(w.tokens), element}},
      .moments = {},
      .input = kept_numbers(w.hidden, element)};
  if (options.ep > 1)
    experts.kept.push_back({"where rows came from", in_rows(3) - w.chosen, kWidest});
  if (w.has_sigmoid_router) experts.kept.push_back({"tokens of the router", w.hidden, kWide});
  if (w.shared > 0)
    append(experts.kept,
           mlp_activations(w.is_gated ? Mlp::kGated : Mlp::kSquared, w.hidden, w.shared, options)
               .kept);
  if (w.shared > 0 && w.is_shared_gated)
    append(experts.kept,
           {{"the shared expert's output", w.hidden, element}, {"its gate", 1, element}});
  // Grouped products give the gradient of all experts' matrices at once, before it is moved into
  // its bucket: of the last one when what it returned is gone, of the first one when the product
  // is, too. And between them the gradients of gate and up.
  const int64_t matrices = w.experts / options.ep * w.tokens * w.intermediate * element;
  const int64_t inner = in_rows(w.intermediate) * element;
  const int64_t of_token = w.hidden * element;
  experts.moments = {
      {.per_token = of_token + inner, .of_weights = matrices},
      {.per_token = of_token + (w.is_gated ? inner : -inner),
       .of_weights = (w.is_gated ? 2 : 1) * matrices},
      {.per_token = of_token + 2 * inner - in_rows(w.tokens) * element, .of_weights = 0}};
  return experts;
}

BlockActivations scan_activations(const NemotronHConfig& c, const ActivationOptions& options) {
  const int64_t positions = positions_of(c.chunk_size, options);
  const int64_t heads = c.mamba_num_heads;
  const int64_t inner = heads * c.mamba_head_dim;
  const int64_t groups = c.n_groups * c.ssm_state_size;
  const int64_t pairs = heads * positions;  // of positions of a chunk
  const int64_t states = ceil_div(inner * c.ssm_state_size, positions);
  return {.kept = {{"x times its steps, twice", 2 * inner, kWide},
                   {"decays", pairs, kWide},
                   {"decayed scores", pairs, kWide},
                   {"scores", c.n_groups * positions, kWide},
                   {"B and C, as products read them", 4 * groups, kWide},
                   {"decays until the end, and since the beginning", 2 * heads, kWidest},
                   {"the same, narrow", 2 * heads, kWide},
                   {"x times the former", inner, kWide},
                   {"states, one by one and together", 2 * states, kWide},
                   {"what states add", inner, kWide}},
          // The gradient of decayed scores, and what it is for decays and for scores, where the
          // scores themselves are gone.
          .moments = {{.per_token = 2 * pairs * kWide}}};
}

BlockActivations delta_rule_activations(const Qwen3NextConfig& c,
                                        const ActivationOptions& options) {
  const int64_t positions = positions_of(kDeltaRuleChunk, options);
  const int64_t heads = c.linear_num_value_heads;
  const int64_t keys = c.linear_num_key_heads * c.linear_key_head_dim;
  const int64_t values = heads * c.linear_value_head_dim;
  const int64_t keys_of_heads = heads * c.linear_key_head_dim;
  const int64_t states = ceil_div(values * c.linear_key_head_dim, positions);
  const int64_t transitions = ceil_div(keys_of_heads * c.linear_key_head_dim, positions);
  return {.kept = {{"queries and keys", 2 * keys, kWide},
                   {"values", values, kWide},
                   {"decays, and rates of correction", 2 * heads, kWide},
                   {"states", states, kWide}},
          // The backward computes chunks again, and has most at its end: matrices of pairs of
          // positions, of keys, and of values.
          .moments = {{.per_token = kWide * ((11 * heads + 2 * c.linear_num_key_heads) * positions +
                                             7 * keys_of_heads + 8 * values + 4 * keys +
                                             2 * states + transitions)}}};
}

std::optional<ModelActivations> activations_of(const ModelConfig& config,
                                               const ActivationOptions& options) {
  if (options.compute != DType::kBFloat16 && options.compute != DType::kFloat16)
    return std::nullopt;
  return std::visit(
      [&](const auto& c) -> std::optional<ModelActivations> {
        Blocks blocks = blocks_of(c, options);
        if (!blocks) return std::nullopt;
        return ModelActivations{sizes_of(c).hidden_size, sizes_of(c).vocab_size,
                                std::move(*blocks)};
      },
      config);
}

}  // namespace fsdp
