// A chain of units whose gradients are known beforehand.
#pragma once

#include <ATen/ATen.h>
#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include <functional>
#include <string>
#include <vector>

#include "fsdp/shard/unit.h"

namespace fsdp::testing {

// loss -> loss + sum(weight * factor): the gradient of every element of the weight is the factor.
struct LinkImpl : torch::nn::Module {
  explicit LinkImpl(int64_t numel) : weight(register_parameter("weight", at::ones({numel}))) {}
  at::Tensor forward(const at::Tensor& loss, double factor) {
    if (on_forward) on_forward();
    return loss + (weight * factor).sum().to(at::kFloat);
  }
  at::Tensor weight;
  std::function<void()> on_forward;  // called while the unit computes
};
TORCH_MODULE(Link);

struct ChainImpl : torch::nn::Module {
  explicit ChainImpl(const std::vector<int64_t>& numels) {
    for (size_t i = 0; i < numels.size(); ++i)
      links.push_back(register_module("link" + std::to_string(i), Unit<Link>(numels[i])));
  }
  at::Tensor forward(double factor) {
    at::Tensor loss = at::zeros({}, at::requires_grad());
    for (Unit<Link>& link : links) loss = link(loss, factor);
    return loss;
  }
  std::vector<Unit<Link>> links;
};
TORCH_MODULE(Chain);

}  // namespace fsdp::testing
