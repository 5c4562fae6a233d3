// A model's configuration as config.json, the file that models are published with: read and
// written.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "fsdp/nn/architecture.h"

namespace fsdp {

class JsonFields;

// The values of "model_type" that are read here.
std::vector<std::string> known_model_types();

// Fields and the defaults of those that may be left out are those of the `transformers` package's
// classes; besides theirs, llama, qwen3 and mixtral may have "num_nextn_predict_layers" and
// "mtp_loss_weight", and mixtral "shared_expert_intermediate_size". Unknown fields are ignored.
// UsageError "source: field is VALUE; fix". What a model has and this project does not compute is
// no error here, since it can be planned all the same; check_trainable() says it.
ModelConfig parse_model_config(std::string_view json_text, const std::string& source);

// The same for a document that is already read, with a model_type of the list above.
ModelConfig read_model_config(const JsonFields& fields);

// A config.json that `transformers` reads, and parse_model_config() to the same values. UsageError
// for a configuration that is not trainable.
std::string config_json(const ModelConfig& config);

}  // namespace fsdp
