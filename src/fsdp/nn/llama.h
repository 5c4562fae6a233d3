// The Llama family as a language model: dense or with experts, with or without multi-token
// prediction.
#pragma once

#include <memory>

#include "fsdp/nn/language_model.h"

namespace fsdp::nn {

// `config` holds a LlamaConfig or a MixtralConfig that is trainable. Values are not set.
std::shared_ptr<LanguageModel> make_llama(const ModelConfig& config, Recompute recompute);

}  // namespace fsdp::nn
