#include "fsdp/train/same_model.h"

#include <optional>
#include <vector>

#include "fsdp/base/error.h"
#include "fsdp/base/text.h"
#include "fsdp/checkpoint/model_files.h"
#include "fsdp/nn/config_json.h"

namespace fsdp::train {

namespace {

// nullopt for configurations of programs of one's own.
std::optional<ModelConfig> stored_model(const std::string& checkpoint) {
  const std::optional<std::string> text = stored_model_config(checkpoint);
  if (!text) return std::nullopt;
  try {
    ModelConfig model = parse_model_config(*text, checkpoint);
    check_trainable(model);
    return model;
  } catch (const UsageError&) {
    return std::nullopt;
  }
}

}  // namespace

void check_same_model(const std::string& checkpoint, const ModelConfig& model, ModelAspect aspect,
                      const std::string& fix) {
  const std::optional<ModelConfig> stored = stored_model(checkpoint);
  if (!stored) return;
  std::vector<std::string> texts;
  for (const FieldDifference& each : differing_fields(*stored, model, aspect))
    texts.push_back(concat(each.field, " was ", each.before, " and is ", each.now, " now"));
  if (!texts.empty())
    throw UsageError(concat(checkpoint, " is of another model: ", join(texts, ", "), "; ", fix));
}

}  // namespace fsdp::train
