// Whether a checkpoint is of the model that somebody wants to load it into: asked before anything
// is built, and answered in words.
#pragma once

#include <string>

#include "fsdp/nn/architecture.h"
#include "fsdp/nn/config_differences.h"

namespace fsdp::train {

// UsageError that names the fields that differ, and ends with `fix`. Nothing where the checkpoint
// (or files of another tool) does not say what model it is of.
void check_same_model(const std::string& checkpoint, const ModelConfig& model, ModelAspect aspect,
                      const std::string& fix);

}  // namespace fsdp::train
