#include "fsdp/nn/llama_block.h"

#include <ATen/ATen.h>

#include <utility>

#include "fsdp/shard/recompute.h"

namespace fsdp::nn {

namespace {

RmsNorm norm_of(const LlamaConfig& c) { return RmsNorm(c.hidden_size, c.rms_norm_eps); }

Attention attention_of(const LlamaBlockOptions& options) {
  const LlamaConfig& c = options.config;
  return Attention(AttentionOptions{.hidden_size = c.hidden_size,
                                    .num_heads = c.num_attention_heads,
                                    .num_kv_heads = c.num_key_value_heads,
                                    .head_dim = head_dim_of(c),
                                    .bias = c.attention_bias,
                                    .qk_norm_eps = c.qk_norm ? c.rms_norm_eps : 0.0,
                                    .standard_deviation = c.initializer_range,
                                    .rotary = options.rotary});
}

// Published checkpoints have the norm of a prediction layer's head in a module of its own.
RmsNorm shared_head_norm(torch::nn::Module& owner, const LlamaConfig& c) {
  auto shared_head = owner.register_module("shared_head", std::make_shared<torch::nn::Module>());
  return shared_head->register_module("norm", norm_of(c));
}

}  // namespace

LlamaLayerParts::LlamaLayerParts(torch::nn::Module& owner, const LlamaBlockOptions& options)
    : input_norm_(owner.register_module("input_layernorm", norm_of(options.config))),
      attention_(owner.register_module("self_attn", attention_of(options))),
      mlp_norm_(owner.register_module("post_attention_layernorm", norm_of(options.config))) {
  const LlamaConfig& c = options.config;
  if (options.experts.num_experts > 0)
    experts_ = owner.register_module("block_sparse_moe", Experts(options.experts));
  else
    mlp_ = owner.register_module("mlp", GatedMlp(GatedMlpOptions{c.hidden_size, c.intermediate_size,
                                                                 c.mlp_bias, c.initializer_range}));
}

BlockOutput LlamaLayerParts::operator()(const at::Tensor& x, LayerCache* cache) {
  const NormedBranch first = input_norm_->branch(x);
  const NormedBranch second = mlp_norm_->branch(first.around, attention_(first.normed, cache));
  if (experts_.is_empty()) return {second.around + mlp_(second.normed)};
  RoutedTokens routed = experts_(second.normed);
  return {second.around + routed.output, std::move(routed.load.mean_probability),
          std::move(routed.load.share)};
}

LlamaBlockImpl::LlamaBlockImpl(const LlamaBlockOptions& options)
    : recompute_(options.recompute), layer_(*this, options) {}

BlockOutput LlamaBlockImpl::forward(const at::Tensor& x, LayerCache* cache) {
  if (recompute_ == Recompute::kNone || cache != nullptr) return layer_(x, cache);
  // Inside the unit: its weights are gathered ahead of the backward as usual.
  return recompute(
      [this](const std::vector<at::Tensor>& inputs) { return layer_(inputs[0], nullptr); }, {x});
}

PredictionBlockImpl::PredictionBlockImpl(const LlamaBlockOptions& options)
    : recompute_(options.recompute),
      embedding_norm_(register_module("enorm", norm_of(options.config))),
      hidden_norm_(register_module("hnorm", norm_of(options.config))),
      joined_(register_module(
          "eh_proj",
          Projection(ProjectionOptions{.in = 2 * options.config.hidden_size,
                                       .out = options.config.hidden_size,
                                       .standard_deviation = options.config.initializer_range}))),
      layer_(*this, options),
      head_norm_(shared_head_norm(*this, options.config)) {}

BlockOutput PredictionBlockImpl::compute(const at::Tensor& hidden, const at::Tensor& embedded) {
  BlockOutput output =
      layer_(joined_(at::cat({embedding_norm_(embedded), hidden_norm_(hidden)}, -1)), nullptr);
  output.insert(output.begin() + 1, head_norm_(output[0]));
  return output;
}

BlockOutput PredictionBlockImpl::forward(const at::Tensor& hidden, const at::Tensor& embedded) {
  if (recompute_ == Recompute::kNone) return compute(hidden, embedded);
  return recompute(
      [this](const std::vector<at::Tensor>& inputs) { return compute(inputs[0], inputs[1]); },
      {hidden, embedded});
}

}  // namespace fsdp::nn
