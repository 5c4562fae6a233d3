#include "fsdp/nn/layers/matrix_layers.h"

#include <ATen/ATen.h>

#include <cmath>

#include "fsdp/base/error.h"
#include "fsdp/base/text.h"
#include "fsdp/comm/mesh.h"
#include "fsdp/nn/layers/linear_functions.h"

namespace fsdp::nn {

namespace {

// Before the weight loses rows.
bool have_own_rows(const at::Tensor& weight, const MeshAxis& tp) {
  return weight.size(0) % tp.size() == 0;
}

// Without ranks. The A of all adapters multiply the input together with the weights.
std::vector<at::Tensor> project_here(const at::Tensor& input,
                                     const std::vector<const ProjectionImpl*>& layers) {
  std::vector<at::Tensor> weights;
  std::vector<at::Tensor> biases;
  for (const ProjectionImpl* layer : layers) {
    weights.push_back(layer->weight);
    biases.push_back(layer->bias);
  }
  for (const ProjectionImpl* layer : layers)
    if (!layer->adapter.a.is_empty()) weights.push_back(layer->adapter.a->weight);
  biases.resize(weights.size());
  std::vector<at::Tensor> outputs = nn::linear(input, weights, biases);
  size_t next = layers.size();
  for (size_t i = 0; i < layers.size(); ++i) {
    const Adapter& adapter = layers[i]->adapter;
    if (adapter.a.is_empty()) continue;
    const at::Tensor narrow = outputs[next++] * adapter.scale;
    outputs[i] = outputs[i] + nn::linear(narrow, adapter.b->weight, at::Tensor());
  }
  outputs.resize(layers.size());
  return outputs;
}

}  // namespace

ProjectionImpl::ProjectionImpl(const ProjectionOptions& options)
    : weight(register_parameter("weight", at::empty({options.out, options.in}))),
      standard_deviation_(options.standard_deviation),
      cut_(options.cut),
      sections_(options.sections) {
  if (options.bias) bias = register_parameter("bias", at::empty({options.out}));
}

AdapterMatrixImpl::AdapterMatrixImpl(int64_t rows, int64_t columns, double bound)
    : weight(register_parameter("weight", at::empty({rows, columns}))), bound_(bound) {}

void AdapterMatrixImpl::reset_parameters() { fill_uniform(weight, "weight", bound_); }

void ProjectionImpl::add_adapter(int64_t rank, double scale) {
  const double bound = 1.0 / std::sqrt(static_cast<double>(weight.size(1)));
  adapter = {.a = register_module("lora_A", AdapterMatrix(rank, weight.size(1), bound)),
             .b = register_module("lora_B", AdapterMatrix(weight.size(0), rank, 0.0)),
             .scale = scale};
}

void ProjectionImpl::join(const MeshAxis& tp) {
  if (!adapter.a.is_empty())
    throw UsageError(concat("tp is ", tp.size(),
                            ", but layers have adapters (LoRA), which ranks of a tp group do not "
                            "share out; leave one of the two out"));
  TokenParallelLayer::join(tp);
}

at::Tensor ProjectionImpl::forward(const at::Tensor& input) {
  if (tp() == nullptr) return project_here(input, {this}).front();
  if (cut_ != ProjectionCut::kInputs) return nn::linear(input, weight, bias);
  const at::Tensor sum = scatter_sequence(nn::linear(input, weight, at::Tensor()), tp());
  return bias.defined() ? sum + bias : sum;
}

TpPlacement ProjectionImpl::tp_placement(const std::string& parameter) const {
  if (cut_ == ProjectionCut::kOutputs) return TpShard{.dim = 0, .section_sizes = sections_};
  // A bias of outputs is added once per token, by the rank that has the token.
  if (cut_ == ProjectionCut::kInputs && parameter == "weight") return TpShard{.dim = 1};
  return TpPartial{};
}

std::vector<int64_t> ProjectionImpl::matrix_rows(const std::string& parameter) const {
  if (parameter != "weight" || weight.size(0) == 1) return {};  // one output: a vector
  return sections_.empty() ? std::vector{weight.size(0)} : sections_;
}

std::vector<at::Tensor> project(const at::Tensor& input, const std::vector<Projection>& layers,
                                const MeshAxis* tp) {
  if (tp == nullptr) {
    std::vector<const ProjectionImpl*> here;
    for (const Projection& layer : layers) here.push_back(layer.get());
    return project_here(input, here);
  }
  std::vector<at::Tensor> weights;
  std::vector<at::Tensor> biases;
  for (const Projection& layer : layers) {
    weights.push_back(layer->weight);
    biases.push_back(layer->bias);
  }
  return gathered_linear(input, weights, biases, *tp);
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
  return has_own_rows_ ? scatter_sequence(of_own_rows(tokens), tp())
                       : at::embedding(weight, own_sequence(tokens, tp()));
}

// Zeros for tokens that another rank has.
at::Tensor EmbeddingImpl::of_own_rows(const at::Tensor& tokens) const {
  const at::Tensor local = tokens - tp()->rank() * weight.size(0);
  const at::Tensor is_absent = local.lt(0).logical_or_(local.ge(weight.size(0)));
  return at::embedding(weight, local.masked_fill(is_absent, 0))
      .masked_fill(is_absent.unsqueeze(-1), 0.0);
}

void EmbeddingImpl::join(const MeshAxis& tp) {
  TokenParallelLayer::join(tp);
  has_own_rows_ = have_own_rows(weight, tp);
}

void EmbeddingImpl::reset_parameters() { fill_normal(weight, "weight", standard_deviation_); }

HeadImpl::HeadImpl(const HeadOptions& options)
    : is_tied_(options.tied_weight.defined()),
      standard_deviation_(options.standard_deviation),
      logit_bytes_(options.logit_bytes),
      norm_(register_module("norm",
                            RmsNorm(options.hidden_size, options.norm_eps, options.norm_weight))) {
  weight =
      register_parameter("weight", is_tied_ ? options.tied_weight
                                            : at::empty({options.vocab_size, options.hidden_size}));
}

at::Tensor HeadImpl::forward(const at::Tensor& x, HeadInput input, const at::Tensor& targets) {
  const at::Tensor own = input == HeadInput::kHidden ? norm_(x) : x;
  if (targets.defined())
    return head_loss(own, weight, targets, {.logit_bytes = logit_bytes_, .ranks = ranks_});
  if (ranks_.part == LogitPart::kVocabulary)
    return gathered_linear(own, {weight}, {at::Tensor()}, *tp()).front();
  return nn::linear(own, weight, at::Tensor());
}

void HeadImpl::join(const MeshAxis& tp) {
  TokenParallelLayer::join(tp);
  ranks_ = {.tp = &tp,
            .part = have_own_rows(weight, tp) ? LogitPart::kVocabulary : LogitPart::kSequence};
}

void HeadImpl::reset_parameters() {
  if (!is_tied_) fill_normal(weight, "weight", standard_deviation_);
}

}  // namespace fsdp::nn
