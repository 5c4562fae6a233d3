#include "fsdp/nn/layers/gated_delta_net.h"

#include <ATen/ATen.h>

#include <cmath>
#include <vector>

#include "fsdp/comm/mesh.h"
#include "fsdp/nn/config/model_config.h"
#include "fsdp/nn/layers/delta_rule.h"
#include "fsdp/nn/layers/feed_forward.h"

namespace fsdp::nn {

namespace {

// Queries and keys are divided by the root of their sum of squares and this.
constexpr double kSquaredLengthEps = 1e-6;

// The range of the first exp(A_log), the published one. Not 0, of which there is no logarithm.
constexpr double kFirstRateMin = 0.01;
constexpr double kFirstRateMax = 16.0;

int64_t key_size(const GatedDeltaNetOptions& o) { return o.num_key_heads * o.key_head_dim; }
int64_t value_size(const GatedDeltaNetOptions& o) { return o.num_value_heads * o.value_head_dim; }

// Channels of queries, keys and values of so many key heads.
std::vector<int64_t> convolved_sizes(const GatedDeltaNetOptions& o, int64_t num_key_heads) {
  const int64_t keys = num_key_heads * o.key_head_dim;
  return {keys, keys, value_size(o) / o.num_key_heads * num_key_heads};
}

// Scales rows to length `length`. The RMS norm does that, too, if its weight is constant, and takes
// one pass where single operations take four.
at::Tensor of_length(const at::Tensor& rows, double length) {
  const auto size = static_cast<double>(rows.size(-1));
  const at::Tensor weight =
      at::full({rows.size(-1)}, length / std::sqrt(size), rows.options().requires_grad(false));
  return rms_norm(rows, weight, kSquaredLengthEps / size);
}

}  // namespace

GatedDeltaNetImpl::GatedDeltaNetImpl(const GatedDeltaNetOptions& o)
    : options_(o),
      num_key_heads_(o.num_key_heads),
      dt_bias_(register_parameter("dt_bias", at::empty({o.num_value_heads}))),
      a_log_(register_parameter("A_log", at::empty({o.num_value_heads}))),
      in_proj_qkvz_(register_module(
          "in_proj_qkvz",
          Projection(ProjectionOptions{o.hidden_size, 2 * key_size(o) + 2 * value_size(o), false,
                                       o.standard_deviation, ProjectionCut::kOutputs}))),
      in_proj_ba_(register_module(
          "in_proj_ba",
          Projection(ProjectionOptions{o.hidden_size, 2 * o.num_value_heads, false,
                                       o.standard_deviation, ProjectionCut::kOutputs}))),
      conv1d_(register_module("conv1d", CausalConv(convolved_sizes(o, o.num_key_heads),
                                                   o.conv_kernel, /*with_bias=*/false))),
      norm_(register_module("norm", RmsNorm(o.value_head_dim, o.norm_eps))),
      out_proj_(register_module("out_proj", Projection(ProjectionOptions{
                                                value_size(o), o.hidden_size, false,
                                                o.standard_deviation, ProjectionCut::kInputs}))) {}

void GatedDeltaNetImpl::join(const MeshAxis& tp) {
  TokenParallelLayer::join(tp);
  check_shared_evenly("linear_num_key_heads", options_.num_key_heads, tp.size());
  num_key_heads_ = options_.num_key_heads / tp.size();
}

TpPlacement GatedDeltaNetImpl::tp_placement(const std::string&) const { return TpShard{.dim = 0}; }

at::Tensor GatedDeltaNetImpl::forward(const at::Tensor& own, LayerCache* cache,
                                      const std::shared_ptr<const Documents>& documents) {
  const GatedDeltaNetOptions& o = options_;
  const at::ScalarType wide = at::promote_types(own.scalar_type(), at::kFloat);
  // Published matrices are divided by key head: first all that belongs to the first one.
  const int64_t shared = o.num_value_heads / o.num_key_heads;
  const std::vector<at::Tensor> projected = project(own, {in_proj_qkvz_, in_proj_ba_}, tp());
  const std::vector<at::Tensor> qkvz =
      projected[0]
          .unflatten(-1, {num_key_heads_, -1})
          .split_with_sizes({o.key_head_dim, o.key_head_dim, shared * o.value_head_dim,
                             shared * o.value_head_dim},
                            -1);
  const std::vector<at::Tensor> ba =
      projected[1].unflatten(-1, {num_key_heads_, -1}).split(shared, -1);

  const at::Tensor qkv = at::cat({qkvz[0].flatten(2), qkvz[1].flatten(2), qkvz[2].flatten(2)}, -1);
  const auto convolve = [&](const std::vector<at::Tensor>& x) {
    return conv1d_(x[0], cache == nullptr ? nullptr : &cache->window);
  };
  const std::vector<at::Tensor> convolved =
      at::silu(in_each_document(documents, {qkv}, convolve))
          .split_with_sizes(convolved_sizes(o, num_key_heads_), -1);
  const auto heads = [&](const at::Tensor& tensor, int64_t size) {
    return tensor.to(wide).unflatten(-1, {-1, size});
  };
  const at::Tensor rate = a_log_.to(wide).exp();
  const auto apply_rule = [&](const std::vector<at::Tensor>& x) {
    return gated_delta_rule(
        {.query = x[0], .key = x[1], .value = x[2], .log_decay = x[3], .beta = x[4]}, o.chunk_size,
        cache == nullptr ? nullptr : &cache->state);
  };
  const at::Tensor y = in_each_document(
      documents,
      {of_length(heads(convolved[0], o.key_head_dim),
                 1.0 / std::sqrt(static_cast<double>(o.key_head_dim))),
       of_length(heads(convolved[1], o.key_head_dim), 1.0), heads(convolved[2], o.value_head_dim),
       -rate * at::softplus(ba[1].flatten(2).to(wide) + dt_bias_.to(wide)),
       ba[0].flatten(2).to(wide).sigmoid()},
      apply_rule);

  const at::Tensor normed = rms_norm(y, norm_->weight.to(wide), o.norm_eps);
  const at::Tensor gate = heads(qkvz[3].flatten(2), o.value_head_dim);
  return out_proj_(gated_silu(gate, normed).flatten(2).to(own.scalar_type()));
}

void GatedDeltaNetImpl::reset_parameters() {
  const at::NoGradGuard no_grad;
  dt_bias_.fill_(1.0);
  const at::Tensor random = at::empty({a_log_.numel()}, at::device(at::kCPU).dtype(at::kFloat));
  fill_uniform(random, "A_log", 0.5);
  a_log_.copy_(
      ((random.to(at::kDouble) + 0.5) * (kFirstRateMax - kFirstRateMin) + kFirstRateMin).log());
}

}  // namespace fsdp::nn
