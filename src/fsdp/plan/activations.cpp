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
std::vector<KeptTensor> kept_input(const char* what, int64_t width, const ActivationOptions& o,
                                   int64_t scales = 1) {
  if (!o.keeps_codes) return {{what, width, element_bytes(o.compute)}};
  return {{what, width, kCodeBytes}, {"scales of its codes", scales, kScaleBytes}};
}

// The same, of an input whose width ranks share: each has rows of all tokens.
std::vector<KeptTensor> kept_product(const char* what, int64_t width, const ActivationOptions& o) {
  return kept_input(what, width, o, o.tp);
}

// The same, of an input that is kept anyway.
std::vector<KeptTensor> kept_codes(const char* what, int64_t width, const ActivationOptions& o) {
  return o.keeps_codes ? kept_product(what, width, o) : std::vector<KeptTensor>{};
}

std::vector<KeptTensor> kept_by_norm(int64_t hidden, int64_t element) {
  return {{"what is normed", hidden, element}, {"its norm's factors", 1, kFactorBytes}};
}

// The input of parts with a layer that is not quantised, like a router.
std::vector<KeptTensor> kept_numbers(int64_t hidden, int64_t element) {
  return {{"normed", hidden, element}};
}

// With tp, what a cut layer has of all tokens: the gradient of its outputs beside that of what its
// last matrices multiply; and at the end, when all that it keeps is gone, its input with its
// gradient. Slices of several sequences are copied to their places.
BlockActivations with_all_tokens(BlockActivations layer, int64_t hidden, int64_t product,
                                 const ActivationOptions& o) {
  if (o.tp == 1) return layer;
  const int64_t element = element_bytes(o.compute);
  const int64_t all = o.tp * hidden * element;
  const int64_t copy = o.rows == 1 ? 0 : all;
  layer.moments.push_back(
      {.per_token = hidden * element + all + std::max(copy, product * element)});
  layer.moments.push_back(
      {.per_token = hidden * element + 2 * (all + copy) - per_token_bytes(layer.kept)});
  return layer;
}

int64_t positions_of(int64_t chunk, const ActivationOptions& options) {
  return options.sequence > 0 ? std::min(chunk, options.sequence) : chunk;
}

// Each layer of a model with `hidden` channels, and what it keeps.
struct KeptByLayer {
  int64_t hidden;
  const ActivationOptions& options;
  int64_t element = element_bytes(options.compute);

  // The gradients of queries, keys and values, with the fp32 sums of the former.
  WorkingBytes of_scores(int64_t queries, int64_t heads) const {
    return {.per_token = element * (hidden + 4 * queries) + kFactorBytes * (queries + heads)};
  }

  BlockActivations operator()(const AttentionLayer& a) const {
    BlockActivations kept{.kept = {{"queries, rotated", a.queries(), element},
                                   {"keys, rotated", a.keys(), element},
                                   {"values", a.keys(), element},
                                   {"what attention returns", a.queries(), element},
                                   {"logarithms of its sums", a.num_heads, kFactorBytes}},
                          .moments = {of_scores(a.queries(), a.num_heads)},
                          .input = kept_input("normed", hidden, options)};
    if (a.qk_norm)
      append(kept.kept, {{"queries before their norm", a.queries(), element},
                         {"keys before theirs", a.keys(), element},
                         {"factors of both", a.num_heads + a.num_kv_heads, kFactorBytes}});
    if (a.is_gated) kept.kept.push_back({"gates", a.queries(), element});
    const std::vector<KeptTensor> by_output =
        a.is_gated ? kept_product("gated", a.queries(), options)
                   : kept_codes("the same as codes", a.queries(), options);
    append(kept.kept, by_output);
    if (options.keeps_codes)  // those of the last layer's input are gone
      kept.moments.front().per_token -= per_token_bytes(by_output);
    return with_all_tokens(std::move(kept), hidden, a.queries(), options);
  }

  // Short vectors, and the queries, keys and values of all heads, which are made as long as each
  // other.
  BlockActivations operator()(const LatentAttentionLayer& layer) const {
    const DeepseekV3Config& c = *layer.config;
    const int64_t heads = c.decoder.num_attention_heads;
    const int64_t size = std::max(query_head_dim_of(c), c.v_head_dim);
    const bool is_widened = c.v_head_dim < size;
    BlockActivations kept{
        .kept = {{"queries and keys, rotated", 2 * heads * size, element},
                 {is_widened ? "values" : "values, beside channels of keys",
                  heads * (is_widened ? size : c.qk_nope_head_dim + c.v_head_dim), element},
                 {"what attention returns", heads * size, element},
                 {"logarithms of its sums", heads, kFactorBytes}},
        .moments = {of_scores(heads * size, heads)},
        .input = kept_input("normed", hidden, options)};
    if (options.keeps_codes) append(kept.input, kept.input);  // by two layers
    for (const int64_t rank : {c.q_lora_rank, c.kv_lora_rank}) {
      if (rank == 0) continue;
      append(kept.kept, kept_by_norm(rank, element));
      append(kept.kept, kept_input("normed", rank, options));
    }
    const std::vector<KeptTensor> by_output =
        is_widened ? kept_product("as long as values", heads * c.v_head_dim, options)
                   : kept_codes("the same as codes", heads * size, options);
    append(kept.kept, by_output);
    kept.moments.front().per_token -= per_token_bytes(by_output);
    return with_all_tokens(std::move(kept), hidden, heads * c.v_head_dim, options);
  }

  BlockActivations operator()(const MambaLayer& layer) const {
    const NemotronHConfig& c = *layer.config;
    const int64_t inner = c.mamba_num_heads * c.mamba_head_dim;
    const int64_t convolved = inner + 2 * c.n_groups * c.ssm_state_size;
    BlockActivations mamba = scan_activations(c, options);
    mamba.input = kept_input("normed", hidden, options);
    append(mamba.kept, {{"gate, x, B, C and steps", inner + convolved + c.mamba_num_heads, element},
                        {"convolved", convolved, element},
                        {"x, B and C", convolved, kWide},
                        {"steps and what they are of", 3 * c.mamba_num_heads, kWide},
                        {"gate", inner, kWide},
                        {"what the scan returns", inner, kWide},
                        {"gated", inner, kWide},
                        {"its norm's factors", c.n_groups, kFactorBytes},
                        {"normed", inner, kWide}});
    append(mamba.kept, kept_product("the same, narrow", inner, options));
    return with_all_tokens(std::move(mamba), hidden, inner, options);
  }

  BlockActivations operator()(const DeltaNetLayer& layer) const {
    const Qwen3NextConfig& c = *layer.config;
    const int64_t keys = c.linear_num_key_heads * c.linear_key_head_dim;
    const int64_t values = c.linear_num_value_heads * c.linear_value_head_dim;
    BlockActivations net = delta_rule_activations(c, options);
    net.input = kept_numbers(hidden, element);
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
    return with_all_tokens(std::move(net), hidden, values, options);
  }

  // The gradients of the product, and of gate and up (or of what is squared), where the product is
  // gone.
  BlockActivations operator()(const MlpLayer& m) const {
    const std::vector<KeptTensor> product =
        kept_product(m.is_gated ? "their product" : "its square", m.inner, options);
    BlockActivations mlp{
        .kept = {{m.is_gated ? "gate" : "what is above 0", m.inner, element}},
        .moments = {{.per_token = element * (hidden + 3 * m.inner) - per_token_bytes(product)}},
        .input = kept_input("normed", hidden, options)};
    if (m.is_gated) mlp.kept.push_back({"up", m.inner, element});
    append(mlp.kept, product);
    return with_all_tokens(std::move(mlp), hidden, m.inner, options);
  }

  BlockActivations operator()(const ExpertsLayer& e) const {
    return experts_activations(e, hidden, options);
  }
};

BlockActivations activations_of(const BlockShape& block, int64_t hidden,
                                const ActivationOptions& options) {
  const int64_t element = element_bytes(options.compute);
  BlockActivations all;
  if (block.joins_embedding) {
    all.inputs = 2;
    append(all.kept, kept_by_norm(hidden, element));
    // The last tokens of several sequences are left out of a copy.
    append(all.kept, kept_by_norm(options.rows > 1 && options.tp == 1 ? hidden : 0, element));
    append(all.kept, kept_input("embedding and state", 2 * hidden, options));
  }
  for (const BranchShape& branch : block.branches) {
    const BlockActivations layer = std::visit(KeptByLayer{hidden, options}, branch.layer);
    append(all.kept, kept_by_norm(hidden, element));
    append(all.kept, layer.input);
    append(all.kept, layer.kept);
    all.weights += layer.weights;
    // Its tensors are gone when the backward of the layers before it begins.
    const int64_t gone = per_token_bytes(layer.input) + per_token_bytes(layer.kept);
    for (WorkingBytes& moment : all.moments) moment.per_token -= gone;
    all.moments.insert(all.moments.end(), layer.moments.begin(), layer.moments.end());
  }
  return all;
}

// Queries that see a part of a sequence keep masks, too.
bool is_known(const BlockShape& block, const ActivationOptions& options) {
  return std::ranges::none_of(block.branches, [&](const BranchShape& branch) {
    const auto* attention = std::get_if<AttentionLayer>(&branch.layer);
    return attention != nullptr && attention->window > 0 && attention->window < options.sequence;
  });
}

}  // namespace

double rows_per_token(int64_t chosen, int64_t experts, const ActivationOptions& options) {
  const bool is_padded = options.pads_experts || options.expert_capacity > 0.0;
  if (options.ep == 1 || !is_padded) return static_cast<double>(chosen);
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
  return fsdp::kept_bytes(tokens, kept) + weights;
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

BlockActivations experts_activations(const ExpertsLayer& w, int64_t hidden,
                                     const ActivationOptions& options) {
  const int64_t element = element_bytes(options.compute);
  const int64_t width = w.latent > 0 ? w.latent : hidden;  // of tokens on their way to experts
  const double rows = rows_per_token(w.chosen, w.experts, options);
  const auto in_rows = [&](int64_t elements) {
    return static_cast<int64_t>(std::ceil(rows * static_cast<double>(elements)));
  };
  const int64_t into = (w.is_gated ? 2 : 1) * w.intermediate;
  BlockActivations experts{
      .kept = {{"probabilities", w.experts, kWide},
               {"chosen weights, and their sum", w.chosen + 1, kWide},
               {"the same, narrow", w.chosen, element},
               {"choices, and where they went", 3 * w.chosen, kWidest},
               {"rows of experts", in_rows(width), element},
               {w.is_gated ? "gate and up" : "what is above 0", in_rows(into), element},
               {w.is_gated ? "their product" : "its square", in_rows(w.intermediate), element},
               {"what experts return", in_rows(width), element}},
      .moments = {},
      .input = kept_numbers(hidden, element)};
  if (options.ep > 1)
    experts.kept.push_back({"where rows came from", in_rows(3) - w.chosen, kWidest});
  if (w.has_sigmoid_router && element != kWide) {
    experts.kept.push_back({"tokens of the router", hidden, kWide});
    experts.weights = w.experts * hidden * kWide;
  }
  if (w.latent > 0) experts.kept.push_back({"what experts add up to", w.latent, element});
  ActivationOptions of_tokens = options;
  of_tokens.tp = 1;  // the shared one is not cut
  if (w.shared > 0) append(experts.kept, KeptByLayer{hidden, of_tokens}(w.shared_mlp()).kept);
  if (w.shared > 0 && w.is_shared_gated)
    append(experts.kept,
           {{"the shared expert's output", hidden, element}, {"its gate", 1, element}});
  // Grouped products give the gradient of all experts' matrices at once, before it is moved into
  // its bucket: of the last one when what it returned is gone, of the first one when the product
  // is, too. And between them the gradients of gate and up.
  const int64_t matrices = w.experts / options.ep * width * w.intermediate * element;
  const int64_t inner = in_rows(w.intermediate) * element;
  const int64_t of_token = hidden * element;
  experts.moments = {
      {.per_token = of_token + inner, .of_weights = matrices},
      {.per_token = of_token + (w.is_gated ? inner : -inner),
       .of_weights = (w.is_gated ? 2 : 1) * matrices},
      {.per_token = of_token + 2 * inner - in_rows(width) * element, .of_weights = 0}};
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
  const ModelLayers layers = layers_of(config);
  ModelActivations all{layers.hidden_size, layers.vocab_size, {}};
  for (const std::vector<BlockShape>* blocks : {&layers.blocks, &layers.predictions})
    for (const BlockShape& block : *blocks) {
      if (!is_known(block, options)) return std::nullopt;
      all.blocks.push_back(activations_of(block, layers.hidden_size, options));
    }
  return all;
}

}  // namespace fsdp
