// Which tensors a model of a known architecture has, from the numbers of its configuration.
//
// Fields are named after the keys of the configurations published with the models, tensors after
// the published checkpoints.
#pragma once

#include <string>

#include "fsdp/nn/config/model_config.h"
#include "fsdp/plan/model_shape.h"

namespace fsdp {

// Throws UsageError with the field, its value and what it must be.
ModelShape build_model(std::string name, const ModelConfig& config);

}  // namespace fsdp
