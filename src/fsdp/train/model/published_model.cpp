#include "fsdp/train/model/published_model.h"

#include <nlohmann/json.hpp>
#include <optional>
#include <utility>
#include <vector>

#include "fsdp/base/check.h"
#include "fsdp/base/durable_file.h"
#include "fsdp/base/json_fields.h"
#include "fsdp/base/text.h"
#include "fsdp/checkpoint/format/model_files.h"
#include "fsdp/checkpoint/run_directory.h"
#include "fsdp/data/tokenizer.h"
#include "fsdp/nn/config/config_json.h"
#include "fsdp/nn/config/presets.h"

namespace fsdp::train {

namespace {

using OrderedJson = nlohmann::ordered_json;

constexpr int64_t kMaxTokenizerBytes = int64_t{1} << 30;

// Fields that have several spellings, of which config_json() writes one.
constexpr const char* kOtherSpellings[] = {"rope_parameters", "layers_block_type",
                                           "attention_head_dim", "full_attention_interval"};

// The files of --tokenizer in place of those that the model came with.
void replace_tokenizer(std::vector<ModelFile>& files, const std::string& tokenizer) {
  constexpr const char* kNoTokenizer = "generation_config.json";
  std::erase_if(files, [](const ModelFile& file) { return file.name != kNoTokenizer; });
  if (tokenizer == kByteTokenizerName) return;
  for (ModelFile& file : stored_model_files(tokenizer))
    if (file.name != kNoTokenizer && file.name != kTokenizerFileName)
      files.push_back(std::move(file));
  const std::string path =
      is_directory(tokenizer) ? concat(tokenizer, "/", kTokenizerFileName) : tokenizer;
  files.push_back({kTokenizerFileName, read_text_file(path, kMaxTokenizerBytes)});
}

// nullopt for models that cannot be trained here.
std::optional<std::string> described_by(const std::string& config) {
  try {
    return config_json(parse_model_config(config, "config.json"));
  } catch (const UsageError&) {
    return std::nullopt;
  }
}

// nullopt for a configuration that a user's own program stored.
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

std::vector<std::string> model_origins(const RunPlan& plan) {
  const TrainOptions& options = plan.options;
  std::vector<std::string> origins;
  if (options.resume != "auto" && options.resume != "never")
    origins.push_back(checkpoint_or_files(options.resume));
  else if (options.resume == "auto" && !options.checkpoint_dir.empty() &&
           !RunDirectory(options.checkpoint_dir).steps().empty())
    origins.push_back(resolve_checkpoint(options.checkpoint_dir));
  if (!plan.init_adapters.empty()) origins.push_back(plan.init_adapters);
  if (!plan.init.empty()) origins.push_back(checkpoint_or_files(plan.init));
  if (find_preset(options.model) == nullptr && is_directory(options.model))
    origins.push_back(options.model);
  return origins;
}

std::string config_json_like(const ModelConfig& model, const std::string& published) {
  const std::string mine = config_json(model);
  const std::optional<std::string> theirs = described_by(published);
  if (theirs == mine) return published;
  if (!theirs) return mine;
  const OrderedJson before = OrderedJson::parse(*theirs);
  const OrderedJson now = OrderedJson::parse(mine);
  OrderedJson merged = OrderedJson::parse(published);
  for (const auto& [field, value] : now.items())
    // Our models all have the same value here; the published one may have another, which counts.
    if (!before.contains(field) || before[field] != value || field != "output_router_logits")
      merged[field] = value;
  for (const char* field : kOtherSpellings) merged.erase(field);
  const std::string text = merged.dump(2) + "\n";
  return described_by(text) == mine ? text : mine;
}

PublishedModel published_model(const RunPlan& plan) {
  PublishedModel published{.config = plan.model_config, .files = {}};
  std::optional<std::string> config;
  for (const std::string& origin : model_origins(plan)) {
    if (!config) config = stored_model_config(origin);
    if (!published.files.empty()) continue;
    published.files = stored_model_files(origin);
    std::erase_if(published.files,
                  [](const auto& file) { return file.name == kAdapterConfigName; });
  }
  if (!config && find_preset(plan.options.model) == nullptr)
    config = read_text_file(plan.model.name, kMaxConfigBytes);
  if (plan.options.tokenizer != "auto") replace_tokenizer(published.files, plan.options.tokenizer);
  if (plan.adapters)
    published.files.push_back({kAdapterConfigName, to_json(*plan.adapters, AdapterReader::kOurs)});
  if (config) published.config = config_json_like(plan.model.config, *config);
  return published;
}

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

std::string tokenizer_path(const std::string& given, std::span<const std::string> origins) {
  if (given != "auto") return given;
  for (const std::string& origin : origins) {
    const std::string directory = is_directory(origin) ? origin : directory_of(origin);
    const std::string path = concat(directory, "/", kTokenizerFileName);
    if (path_exists(path)) return path;
  }
  return kByteTokenizerName;
}

std::vector<int64_t> stored_end_tokens(const std::string& checkpoint) {
  std::vector<int64_t> ends;
  const auto add = [&](const std::string& text, const std::string& source) {
    const nlohmann::json config = parse_json(text, source);
    const nlohmann::json field = config.value("eos_token_id", nlohmann::json());
    // One number, or a list of them.
    for (const nlohmann::json& each : field.is_array() ? field : nlohmann::json::array({field}))
      if (each.is_number_integer()) ends.push_back(each.get<int64_t>());
  };
  for (const ModelFile& file : stored_model_files(checkpoint))
    if (file.name == "generation_config.json") add(file.text, concat(checkpoint, "/", file.name));
  if (const auto config = stored_model_config(checkpoint))
    add(*config, concat(checkpoint, "/config.json"));
  return ends;
}

}  // namespace fsdp::train
