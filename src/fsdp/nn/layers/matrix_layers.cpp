#include "fsdp/nn/layers/matrix_layers.h"

#include <ATen/ATen.h>

#include "fsdp/nn/layers/linear.h"

namespace fsdp::nn {

ProjectionImpl::ProjectionImpl(const ProjectionOptions& options)
    : weight(register_parameter("weight", at::empty({options.out, options.in}))),
      standard_deviation_(options.standard_deviation) {
  if (options.bias) bias = register_parameter("bias", at::empty({options.out}));
}

at::Tensor ProjectionImpl::forward(const at::Tensor& input) {
  return nn::linear(input, weight, bias);
}

std::vector<at::Tensor> project(const at::Tensor& input, const std::vector<Projection>& layers) {
  std::vector<at::Tensor> weights;
  std::vector<at::Tensor> biases;
  for (const Projection& layer : layers) {
    weights.push_back(layer->weight);
    biases.push_back(layer->bias);
  }
  return nn::linear(input, weights, biases);
}

void ProjectionImpl::reset_parameters() {
  fill_normal(weight, "weight", standard_deviation_);
  if (bias.defined()) {
    const at::NoGradGuard no_grad;
    bias.zero_();
  }
}

EmbeddingImpl::EmbeddingImpl(int64_t vocab_size, int64_t hidden_size, double standard_deviation)
    : weight(register_parameter("weight", at::empty({vocab_size, hidden_size}))),
      standard_deviation_(standard_deviation) {}

at::Tensor EmbeddingImpl::forward(const at::Tensor& tokens) {
  return at::embedding(weight, tokens);
}

void EmbeddingImpl::reset_parameters() { fill_normal(weight, "weight", standard_deviation_); }

at::Tensor last_position(const at::Tensor& hidden) {
  return hidden.narrow(1, hidden.size(1) - 1, 1);
}

HeadImpl::HeadImpl(const HeadOptions& options)
    : is_tied_(options.tied_weight.defined()),
      standard_deviation_(options.standard_deviation),
      norm_(register_module("norm", RmsNorm(options.hidden_size, options.norm_eps))) {
  weight =
      register_parameter("weight", is_tied_ ? options.tied_weight
                                            : at::empty({options.vocab_size, options.hidden_size}));
}

at::Tensor HeadImpl::forward(const at::Tensor& x, HeadInput input) {
  return nn::linear(input == HeadInput::kHidden ? norm_(x) : x, weight, at::Tensor());
}

void HeadImpl::reset_parameters() {
  if (!is_tied_) fill_normal(weight, "weight", standard_deviation_);
}

}  // namespace fsdp::nn
