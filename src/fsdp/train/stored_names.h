// The names of a model's tensors in checkpoints, as rules.
#pragma once

#include "fsdp/checkpoint/name_rules.h"
#include "fsdp/nn/language_model.h"

namespace fsdp::train {

// Published checkpoints' names where the module tree has others.
NameRules stored_name_rules(const LanguageModel& model);

}  // namespace fsdp::train
