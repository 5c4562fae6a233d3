#include "fsdp/nn/projection.h"

#include <ATen/ATen.h>

#include "fsdp/nn/linear.h"

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

}  // namespace fsdp::nn
