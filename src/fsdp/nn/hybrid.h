// Nemotron-H as a language model: Mamba-2, MLP and attention layers by a pattern.
#pragma once

#include <memory>

#include "fsdp/nn/language_model.h"

namespace fsdp::nn {

// The configuration is trainable. Values are not set.
std::shared_ptr<LanguageModel> make_hybrid(const NemotronHConfig& config, Recompute recompute);

}  // namespace fsdp::nn
