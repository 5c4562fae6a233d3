// Adapters of low rank in a model that is planned: the tensors that nn/layers/adapters.h adds.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "fsdp/nn/config/lora_options.h"
#include "fsdp/plan/model_shape.h"

namespace fsdp {

// Adds them behind the layers that they adapt, and freezes the rest. Returns the names of these
// layers. UsageError for globs that name no linear layer.
std::vector<std::string> add_adapters(ModelShape& model, const LoraOptions& options);

// The sum of the ranks of a unit's adapters.
int64_t adapter_ranks(const UnitShape& unit);

// Elements of all adapters.
int64_t num_adapter_parameters(const ModelShape& model);

}  // namespace fsdp
