#include "fsdp/nn/layers/latent_attention.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "fsdp/comm/mesh.h"
#include "fsdp/nn/config/model_config.h"
#include "fsdp/nn/layers/attention.h"

namespace fsdp::nn {

namespace {

// The published class has it in these norms whatever rms_norm_eps is.
constexpr double kLatentNormEps = 1e-6;

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

LatentAttentionImpl::LatentAttentionImpl(const LatentAttentionOptions& o,
                                         std::shared_ptr<Rotary> rotary)
    : options_(o), rotary_(std::move(rotary)) {
  const auto projection = [&](const char* name, int64_t in, int64_t out, bool bias,
                              ProjectionCut cut) {
    return register_module(name,
                           Projection(ProjectionOptions{in, out, bias, o.standard_deviation, cut}));
  };
  const auto norm = [&](const char* name, int64_t size) {
    return register_module(name, RmsNorm(size, kLatentNormEps));
  };
  const int64_t queries = o.num_heads * (o.plain_size + o.rotary_size);
  if (o.query_rank == 0) {
    q_proj_ = projection("q_proj", o.hidden_size, queries, false, ProjectionCut::kOutputs);
  } else {
    q_a_proj_ = projection("q_a_proj", o.hidden_size, o.query_rank, o.bias, ProjectionCut::kNone);
    q_a_layernorm_ = norm("q_a_layernorm", o.query_rank);
    q_b_proj_ = projection("q_b_proj", o.query_rank, queries, false, ProjectionCut::kOutputs);
  }
  kv_a_proj_ = projection("kv_a_proj_with_mqa", o.hidden_size, o.key_value_rank + o.rotary_size,
                          o.bias, ProjectionCut::kNone);
  kv_a_layernorm_ = norm("kv_a_layernorm", o.key_value_rank);
  kv_b_proj_ =
      projection("kv_b_proj", o.key_value_rank, o.num_heads * (o.plain_size + o.value_size), false,
                 ProjectionCut::kOutputs);
  o_proj_ = projection("o_proj", o.num_heads * o.value_size, o.hidden_size, o.bias,
                       ProjectionCut::kInputs);
}

void LatentAttentionImpl::join(const MeshAxis& tp) {
  TokenParallelLayer::join(tp);
  check_shared_evenly("num_attention_heads", options_.num_heads, tp.size());
}

at::Tensor LatentAttentionImpl::queries_of(const at::Tensor& own) {
  if (!q_proj_.is_empty()) return project(own, {q_proj_}, tp()).front();
  return project(q_a_layernorm_(q_a_proj_(own)), {q_b_proj_}, tp()).front();
}

at::Tensor LatentAttentionImpl::forward(const at::Tensor& own, LayerCache* cache,
                                        const std::shared_ptr<const Documents>& documents) {
  const auto& o = options_;
  const auto heads_of = [](const at::Tensor& projected, std::vector<int64_t> sizes) {
    return projected.view({projected.size(0), projected.size(1), -1, sizes[0] + sizes[1]})
        .split_with_sizes(sizes, -1);
  };
  const std::vector<at::Tensor> query = heads_of(queries_of(own), {o.plain_size, o.rotary_size});
  const std::vector<at::Tensor> latent =
      kv_a_proj_(own).split_with_sizes({o.key_value_rank, o.rotary_size}, -1);
  const std::vector<at::Tensor> key_value =
      heads_of(project(kv_a_layernorm_(latent[0]), {kv_b_proj_}, tp()).front(),
               {o.plain_size, o.value_size});
  // One head of keys, for the heads of every rank.
  const at::Tensor shared_key = gather_sequence(latent[1], tp()).unsqueeze(2);

  const int64_t begin = cache != nullptr && cache->key.defined() ? cache->key.size(1) : 0;
  const QueryAndKey turned =
      rotated(o.is_paired ? QueryAndKey{pairs_apart(query[1]), pairs_apart(shared_key)}
                          : QueryAndKey{query[1], shared_key},
              *rotary_, begin, documents);
  at::Tensor key = at::cat({key_value[0], turned.key.expand_as(turned.query)}, -1);
  at::Tensor value = key_value[1];
  if (cache != nullptr) {
    key = appended(cache->key, key);
    value = appended(cache->value, value);
  }
  // libtorch's kernels that save memory want heads of one size.
  const int64_t size = std::max(o.plain_size + o.rotary_size, o.value_size);
  const at::Tensor mixed =
      attention_in_documents(widened(at::cat({query[0], turned.query}, -1), size),
                             widened(key, size), widened(value, size), {.scale = o.scale},
                             documents)
          .narrow(-1, 0, o.value_size);
  return o_proj_(mixed.flatten(2));
}

}  // namespace fsdp::nn
