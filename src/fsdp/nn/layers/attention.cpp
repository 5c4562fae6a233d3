#include "fsdp/nn/layers/attention.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <tuple>
#include <utility>
#include <vector>

#include "fsdp/comm/mesh.h"
#include "fsdp/nn/config/model_config.h"

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

// What q_proj has of a head.
int64_t query_size(const AttentionOptions& options) {
  return options.is_gated ? 2 * options.head_dim : options.head_dim;
}

}  // namespace

// With a window, queries in parts of its length: none of a part sees more than two windows of keys.
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

at::Tensor appended(at::Tensor& kept, const at::Tensor& more) {
  kept = kept.defined() ? at::cat({kept, more}, 1) : more;
  return kept;
}

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

// In documents: all tokens as one sequence, each with its own row of the tables.
QueryAndKey rotated(const QueryAndKey& heads, Rotary& rotary, int64_t begin,
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

AttentionImpl::AttentionImpl(const AttentionOptions& options)
    : options_(options),
      q_proj_(register_module(
          "q_proj", Projection(ProjectionOptions{
                        options.hidden_size, options.num_heads * query_size(options), options.bias,
                        options.standard_deviation, ProjectionCut::kOutputs}))),
      k_proj_(register_module(
          "k_proj", Projection(ProjectionOptions{
                        options.hidden_size, options.num_kv_heads * options.head_dim, options.bias,
                        options.standard_deviation, ProjectionCut::kOutputs}))),
      v_proj_(register_module(
          "v_proj", Projection(ProjectionOptions{
                        options.hidden_size, options.num_kv_heads * options.head_dim, options.bias,
                        options.standard_deviation, ProjectionCut::kOutputs}))),
      o_proj_(register_module("o_proj", Projection(ProjectionOptions{
                                            options.num_heads * options.head_dim,
                                            options.hidden_size, options.output_bias,
                                            options.standard_deviation, ProjectionCut::kInputs}))) {
  if (options.qk_norm_eps == 0.0) return;
  const auto norm = [&] {
    return RmsNorm(options.head_dim, options.qk_norm_eps, options.qk_norm_weight);
  };
  q_norm_ = register_module("q_norm", norm());
  k_norm_ = register_module("k_norm", norm());
}

void AttentionImpl::join(const MeshAxis& tp) {
  TokenParallelLayer::join(tp);
  check_shared_evenly("num_attention_heads", options_.num_heads, tp.size());
  check_shared_evenly("num_key_value_heads", options_.num_kv_heads, tp.size());
}

at::Tensor AttentionImpl::forward(const at::Tensor& own, LayerCache* cache,
                                  const std::shared_ptr<const Documents>& documents) {
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
    const int64_t begin = cache != nullptr && cache->key.defined() ? cache->key.size(1) : 0;
    QueryAndKey turned = rotated({query, key}, *options_.rotary, begin, documents);
    query = std::move(turned.query);
    key = std::move(turned.key);
  }
  if (cache != nullptr) {
    key = appended(cache->key, key);
    value = appended(cache->value, value);
  }
  at::Tensor mixed = attention_in_documents(query, key, value, options_.scores, documents);
  if (gate.defined()) mixed = mixed * gate.sigmoid();
  return o_proj_(mixed.flatten(2));
}

}  // namespace fsdp::nn
