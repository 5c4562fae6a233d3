#include "fsdp/nn/layers/attention.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>
#include <tuple>
#include <utility>
#include <variant>
#include <vector>

namespace fsdp::nn {

namespace {

// Devices' half-precision kernels and the host's kernels read a group's keys and values in place;
// for other types, devices have memory-saving kernels only for equal numbers of heads.
bool reads_groups_in_place(const at::Tensor& query) {
  return query.device().is_cpu() || query.scalar_type() == at::kBFloat16 ||
         query.scalar_type() == at::kHalf;
}

// [batch, kv_heads, sequence, head_dim] -> as many heads as the queries have.
at::Tensor repeated(const at::Tensor& x, int64_t group) {
  return x.unsqueeze(2)
      .expand({x.size(0), x.size(1), group, x.size(2), x.size(3)})
      .reshape({x.size(0), x.size(1) * group, x.size(2), x.size(3)});
}

// Queries belong to the last positions; libtorch's own causal mask needs as many keys as queries.
std::optional<at::Tensor> mask_of(const at::Tensor& query, const at::Tensor& key, int64_t window) {
  const int64_t num_earlier = key.size(2) - query.size(2);
  const bool is_cut = window > 0 && key.size(2) > window;
  if (!is_cut && (num_earlier == 0 || query.size(2) == 1)) return std::nullopt;
  const at::Tensor earlier =
      at::ones({query.size(2), key.size(2)}, query.options().dtype(at::kBool)).tril(num_earlier);
  return is_cut ? earlier.triu(num_earlier - window + 1) : earlier;
}

at::Tensor attention_to(const at::Tensor& query, at::Tensor key, at::Tensor value,
                        const ScoreOptions& options) {
  const int64_t group = query.size(1) / key.size(1);
  const bool in_place = group > 1 && reads_groups_in_place(query);
  if (group > 1 && !in_place) {
    key = repeated(key, group);
    value = repeated(value, group);
  }
  const std::optional<at::Tensor> mask = mask_of(query, key, options.window);
  return at::scaled_dot_product_attention(query, key, value, mask, /*dropout_p=*/0.0,
                                          /*is_causal=*/!mask && query.size(2) == key.size(2),
                                          options.scale, /*enable_gqa=*/in_place);
}

// Whether libtorch's kernels for sequences of unlike lengths take these.
bool has_packed_kernel(const at::Tensor& query) {
  const bool is_narrow = query.scalar_type() == at::kBFloat16 || query.scalar_type() == at::kHalf;
  return query.device().is_cuda() && is_narrow && query.size(3) % 8 == 0 && query.size(3) <= 256;
}

// [batch, sequence, heads, size]
at::Tensor heads_of(const at::Tensor& projected, int64_t size) {
  return projected.view({projected.size(0), projected.size(1), -1, size});
}

// The rows of q_proj for a head.
int64_t query_size(const AttentionOptions& options) {
  return options.is_gated ? 2 * options.head_dim : options.head_dim;
}

// [batch, heads, positions, head_dim] each; the queries belong to the last positions. With a
// window, queries come in parts of its length: none of a part sees more than two windows of keys.
at::Tensor causal_attention(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                            const ScoreOptions& options) {
  const int64_t window = options.window;
  if (window == 0 || key.size(2) <= window) return attention_to(query, key, value, options);
  const int64_t num_earlier = key.size(2) - query.size(2);
  std::vector<at::Tensor> parts;
  for (int64_t begin = 0; begin < query.size(2); begin += window) {
    const int64_t count = std::min(window, query.size(2) - begin);
    const int64_t first = std::max<int64_t>(0, num_earlier + begin - window + 1);
    const int64_t num_keys = num_earlier + begin + count - first;
    parts.push_back(attention_to(query.narrow(2, begin, count), key.narrow(2, first, num_keys),
                                 value.narrow(2, first, num_keys), options));
  }
  return parts.size() == 1 ? parts.front() : at::cat(parts, 2);
}

// Keys and values: [batch, positions, heads, head_dim].
struct KeyAndValue {
  at::Tensor key;
  at::Tensor value;
};

int64_t num_cached(const LayerContext& context) {
  return context.cache != nullptr && context.cache->key.defined() ? context.cache->key.size(1) : 0;
}

// Those of the positions so far, which the cache keeps, if there is one.
KeyAndValue with_cached(const KeyAndValue& more, LayerCache* cache) {
  if (cache == nullptr) return more;
  const auto append = [](at::Tensor& kept, const at::Tensor& last) {
    kept = kept.defined() ? at::cat({kept, last}, 1) : last;
  };
  append(cache->key, more.key);
  append(cache->value, more.value);
  return {cache->key, cache->value};
}

// Tensors are [batch, positions, heads, head_dim].
at::Tensor attention_in_documents(const at::Tensor& query, const at::Tensor& key,
                                  const at::Tensor& value, const ScoreOptions& options,
                                  const std::shared_ptr<const Documents>& documents) {
  const bool sees_all =
      options.window == 0 || (documents && documents->longest() <= options.window);
  if (documents && sees_all && has_packed_kernel(query))
    return std::get<0>(at::_flash_attention_forward(
                           query.flatten(0, 1), key.flatten(0, 1), value.flatten(0, 1),
                           documents->offsets(), documents->offsets(), documents->longest(),
                           documents->longest(), /*dropout_p=*/0.0, /*is_causal=*/true,
                           /*return_debug_mask=*/false, options.scale))
        .view(query.sizes());
  return in_each_document(documents, {query, key, value}, [&](const std::vector<at::Tensor>& x) {
    return causal_attention(x[0].transpose(1, 2), x[1].transpose(1, 2), x[2].transpose(1, 2),
                            options)
        .transpose(1, 2);
  });
}

// Turns heads of tokens whose positions begin with `begin`, or with 0 in each document: then all
// tokens are one sequence, each with its own row of the tables.
QueryAndKey turned(const QueryAndKey& heads, Rotary& rotary, int64_t begin,
                   const std::shared_ptr<const Documents>& documents) {
  const at::Tensor& query = heads.query;
  if (!documents) return rotate(heads, rotary.tables(begin, begin + query.size(1), query.device()));
  const RotaryTables tables = rotary.tables(0, documents->longest(), query.device());
  const at::Tensor positions = documents->positions().flatten();
  const QueryAndKey result =
      rotate({query.flatten(0, 1).unsqueeze(0), heads.key.flatten(0, 1).unsqueeze(0)},
             {tables.cosine.index_select(0, positions), tables.sine.index_select(0, positions)});
  return {result.query.reshape(query.sizes()), result.key.reshape(heads.key.sizes())};
}

}  // namespace

AttentionImpl::AttentionImpl(const AttentionOptions& o) : options_(o) {
  const auto projection = [&](const char* name, int64_t in, int64_t out, bool bias,
                              ProjectionCut cut) {
    return register_module(name,
                           Projection(ProjectionOptions{in, out, bias, o.standard_deviation, cut}));
  };
  const int64_t keys = o.num_kv_heads * o.head_dim;
  q_proj_ = projection("q_proj", o.hidden_size, o.num_heads * query_size(o), o.bias,
                       ProjectionCut::kOutputs);
  k_proj_ = projection("k_proj", o.hidden_size, keys, o.bias, ProjectionCut::kOutputs);
  v_proj_ = projection("v_proj", o.hidden_size, keys, o.bias, ProjectionCut::kOutputs);
  o_proj_ = projection("o_proj", o.num_heads * o.head_dim, o.hidden_size, o.output_bias,
                       ProjectionCut::kInputs);
  if (o.qk_norm_eps == 0.0) return;
  const auto norm = [&](const char* name) {
    return register_module(name, RmsNorm(o.head_dim, o.qk_norm_eps, o.qk_norm_weight));
  };
  q_norm_ = norm("q_norm");
  k_norm_ = norm("k_norm");
}

at::Tensor AttentionImpl::forward(const at::Tensor& own, const LayerContext& context) {
  const std::vector<at::Tensor> projected = project(own, {q_proj_, k_proj_, v_proj_}, tp());
  at::Tensor query = heads_of(projected[0], query_size(options_));
  at::Tensor gate;
  if (options_.is_gated) {
    const std::vector<at::Tensor> both = query.chunk(2, -1);
    query = both[0];
    gate = both[1];
  }
  at::Tensor key = heads_of(projected[1], options_.head_dim);
  at::Tensor value = heads_of(projected[2], options_.head_dim);
  if (!q_norm_.is_empty()) {
    query = q_norm_(query);
    key = k_norm_(key);
  }
  if (options_.rotary) {
    QueryAndKey heads =
        turned({query, key}, *options_.rotary, num_cached(context), context.documents);
    query = std::move(heads.query);
    key = std::move(heads.key);
  }
  const KeyAndValue all = with_cached({key, value}, context.cache);
  at::Tensor mixed =
      attention_in_documents(query, all.key, all.value, options_.scores, context.documents);
  if (gate.defined()) mixed = mixed * gate.sigmoid();
  return o_proj_(mixed.flatten(2));
}

// --- latent attention ----------------------------------------------------------------------------

namespace {

// The published class has it in these norms whatever rms_norm_eps is.
constexpr double kLatentNormEps = 1e-6;

// For longer texts than those of the first training, yarn makes scores larger.
double score_scale(const DeepseekV3Config& c) {
  const double scale = 1.0 / std::sqrt(static_cast<double>(query_head_dim_of(c)));
  const auto* yarn = std::get_if<YarnRopeScaling>(&c.decoder.rope_scaling);
  if (yarn == nullptr || yarn->mscale_all_dim == 0.0) return scale;
  const double magnitude = yarn_mscale(yarn->factor, yarn->mscale_all_dim);
  return scale * magnitude * magnitude;
}

// Moves the first ones of neighbouring channels before the second ones, as rotate() wants them.
// Queries and keys are moved alike, so scores stay.
at::Tensor pairs_apart(const at::Tensor& heads) {
  return heads.unflatten(-1, {-1, 2}).transpose(-1, -2).flatten(-2);
}

// Zeros behind the channels, which change neither scores nor the channels before them.
at::Tensor widened(const at::Tensor& heads, int64_t size) {
  const int64_t missing = size - heads.size(-1);
  return missing == 0 ? heads : at::constant_pad_nd(heads, {0, missing});
}

}  // namespace

LatentAttentionImpl::LatentAttentionImpl(const DeepseekV3Config& c, std::shared_ptr<Rotary> rotary)
    : plain_size_(c.qk_nope_head_dim),
      rotary_size_(head_dim_of(c.decoder)),
      value_size_(c.v_head_dim),
      key_value_rank_(c.kv_lora_rank),
      is_paired_(c.rope_interleave),
      scale_(score_scale(c)),
      rotary_(std::move(rotary)) {
  const auto projection = [&](const char* name, int64_t in, int64_t out, bool bias,
                              ProjectionCut cut) {
    return register_module(
        name, Projection(ProjectionOptions{in, out, bias, c.decoder.initializer_range, cut}));
  };
  const auto norm = [&](const char* name, int64_t size) {
    return register_module(name, RmsNorm(size, kLatentNormEps));
  };
  const int64_t hidden = c.decoder.hidden_size;
  const int64_t heads = c.decoder.num_attention_heads;
  const bool bias = c.decoder.attention_bias;
  const int64_t queries = heads * query_head_dim_of(c);
  if (c.q_lora_rank == 0) {
    q_proj_ = projection("q_proj", hidden, queries, false, ProjectionCut::kOutputs);
  } else {
    q_a_proj_ = projection("q_a_proj", hidden, c.q_lora_rank, bias, ProjectionCut::kNone);
    q_a_layernorm_ = norm("q_a_layernorm", c.q_lora_rank);
    q_b_proj_ = projection("q_b_proj", c.q_lora_rank, queries, false, ProjectionCut::kOutputs);
  }
  kv_a_proj_ = projection("kv_a_proj_with_mqa", hidden, key_value_rank_ + rotary_size_, bias,
                          ProjectionCut::kNone);
  kv_a_layernorm_ = norm("kv_a_layernorm", key_value_rank_);
  kv_b_proj_ = projection("kv_b_proj", key_value_rank_, heads * (plain_size_ + value_size_), false,
                          ProjectionCut::kOutputs);
  o_proj_ = projection("o_proj", heads * value_size_, hidden, bias, ProjectionCut::kInputs);
}

at::Tensor LatentAttentionImpl::queries_of(const at::Tensor& own) {
  if (!q_proj_.is_empty()) return project(own, {q_proj_}, tp()).front();
  return project(q_a_layernorm_(q_a_proj_(own)), {q_b_proj_}, tp()).front();
}

at::Tensor LatentAttentionImpl::forward(const at::Tensor& own, const LayerContext& context) {
  const auto heads_of = [](const at::Tensor& projected, std::vector<int64_t> sizes) {
    return projected.view({projected.size(0), projected.size(1), -1, sizes[0] + sizes[1]})
        .split_with_sizes(sizes, -1);
  };
  const std::vector<at::Tensor> query = heads_of(queries_of(own), {plain_size_, rotary_size_});
  const std::vector<at::Tensor> latent =
      kv_a_proj_(own).split_with_sizes({key_value_rank_, rotary_size_}, -1);
  const std::vector<at::Tensor> key_value = heads_of(
      project(kv_a_layernorm_(latent[0]), {kv_b_proj_}, tp()).front(), {plain_size_, value_size_});
  // One head of keys, for the heads of every rank.
  const at::Tensor shared_key = gather_sequence(latent[1], tp()).unsqueeze(2);

  const QueryAndKey heads =
      turned(is_paired_ ? QueryAndKey{pairs_apart(query[1]), pairs_apart(shared_key)}
                        : QueryAndKey{query[1], shared_key},
             *rotary_, num_cached(context), context.documents);
  const KeyAndValue all = with_cached(
      {at::cat({key_value[0], heads.key.expand_as(heads.query)}, -1), key_value[1]}, context.cache);
  // libtorch's kernels that save memory want heads of one size.
  const int64_t size = std::max(plain_size_ + rotary_size_, value_size_);
  const at::Tensor mixed =
      attention_in_documents(widened(at::cat({query[0], heads.query}, -1), size),
                             widened(all.key, size), widened(all.value, size), {.scale = scale_},
                             context.documents)
          .narrow(-1, 0, value_size_);
  return o_proj_(mixed.flatten(2));
}

}  // namespace fsdp::nn
