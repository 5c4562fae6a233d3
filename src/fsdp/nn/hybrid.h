// Nemotron-H as a language model: Mamba-2, MLP, attention and expert layers by a pattern, with or
// without multi-token prediction.
#pragma once

#include <memory>

#include "fsdp/nn/language_model.h"

namespace fsdp::nn {

// `config` must be trainable. Leaves values unset.
std::shared_ptr<LanguageModel> make_hybrid(const NemotronHConfig& config,
                                           const BuildOptions& options);

}  // namespace fsdp::nn
