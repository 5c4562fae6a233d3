// Reads and writes a model's configuration as config.json, the file that models are published with.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "fsdp/nn/config/model_config.h"

namespace fsdp {

class JsonFields;

// The values of "model_type" that this project reads.
std::vector<std::string> known_model_types();

// Fields and defaults are those of the `transformers` package's classes; besides these, llama,
// qwen3 and mixtral may have "num_nextn_predict_layers" and "mtp_loss_weight", and mixtral
// "shared_expert_intermediate_size". Ignores unknown fields. UsageError "source: field is VALUE;
// fix". Accepts fields that this project does not compute, since such a model can be planned;
// check_trainable() refuses them.
ModelConfig parse_model_config(std::string_view json_text, const std::string& source);

// Reads a parsed document, with a model_type of the list above.
ModelConfig read_model_config(const JsonFields& fields);

// A config.json that `transformers` reads, and that parse_model_config() reads back as the same
// values. UsageError for a configuration that is not trainable.
std::string config_json(const ModelConfig& config);

// --- comparing -----------------------------------------------------------------------------------

// The part that must be the same: the tensors alone, or the results, too. Fields that only training
// and initial values depend on may differ.
enum class ModelAspect : uint8_t { kTensors, kResults };

struct FieldDifference {
  std::string field;
  std::string before;  // JSON, or "none"
  std::string now;
};

// In the order of config.json. Models of different types differ in their type alone.
std::vector<FieldDifference> differing_fields(const ModelConfig& before, const ModelConfig& now,
                                              ModelAspect aspect);

}  // namespace fsdp
