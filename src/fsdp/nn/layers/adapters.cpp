#include "fsdp/nn/layers/adapters.h"

#include <ATen/ATen.h>

#include "fsdp/nn/layers/matrix_layers.h"

namespace fsdp::nn {

LoraOptions add_adapters(torch::nn::Module& model, const LoraOptions& options) {
  if (!options.is_on()) return options;
  for (at::Tensor& parameter : model.parameters()) parameter.requires_grad_(false);
  std::vector<std::string> layers;
  LoraOptions result = options;
  result.on.clear();
  for (const auto& item : model.named_modules()) {
    auto* layer = dynamic_cast<ProjectionImpl*>(item.value().get());
    if (layer == nullptr) continue;
    layers.push_back(item.key());
    if (!options.adapts(item.key())) continue;
    layer->add_adapter(options.rank, options.scale());
    result.on.push_back(item.key());
  }
  options.check_used(layers);
  return result;
}

}  // namespace fsdp::nn
