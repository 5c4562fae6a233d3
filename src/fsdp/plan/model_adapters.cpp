#include "fsdp/plan/model_adapters.h"

#include "fsdp/base/text.h"

namespace fsdp {

namespace {

constexpr std::string_view kWeight = ".weight";
constexpr std::string_view kDownName = ".lora_A.weight";
constexpr std::string_view kUpName = ".lora_B.weight";

}  // namespace

std::vector<std::string> add_adapters(ModelShape& model, const LoraOptions& options) {
  if (!options.is_on()) return {};
  std::vector<std::string> layers;
  std::vector<std::string> adapted;
  for (UnitShape& unit : model.units) {
    std::vector<TensorShape> tensors;
    for (TensorShape& tensor : unit.tensors) {
      tensor.is_frozen = true;
      tensors.push_back(tensor);
      if (!tensor.is_linear) continue;
      const std::string layer = tensor.name.substr(0, tensor.name.size() - kWeight.size());
      layers.push_back(layer);
      if (!options.adapts(layer)) continue;
      adapted.push_back(layer);
      tensors.push_back(
          {.name = concat(layer, kDownName), .shape = {options.rank, tensor.shape[1]}});
      tensors.push_back({.name = concat(layer, kUpName), .shape = {tensor.shape[0], options.rank}});
    }
    unit.tensors = std::move(tensors);
  }
  options.check_used(layers);
  return adapted;
}

int64_t adapter_ranks(const UnitShape& unit) {
  int64_t sum = 0;
  for (const TensorShape& tensor : unit.tensors)
    if (tensor.name.ends_with(kDownName)) sum += tensor.shape[0];
  return sum;
}

int64_t num_adapter_parameters(const ModelShape& model) {
  int64_t sum = 0;
  for (const UnitShape& unit : model.units)
    for (const TensorShape& tensor : unit.tensors) sum += tensor.is_frozen ? 0 : tensor.numel();
  return sum;
}

}  // namespace fsdp
