// Nemotron-H as a language model: Mamba-2, MLP and attention layers by a pattern.
#pragma once

#include <memory>

#include "fsdp/nn/language_model.h"

namespace fsdp::nn {

// `config` must be trainable. Leaves values unset.
std::shared_ptr<LanguageModel> make_hybrid(const NemotronHConfig& config, Recompute recompute);

}  // namespace fsdp::nn
