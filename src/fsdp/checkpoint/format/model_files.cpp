#include "fsdp/checkpoint/format/model_files.h"

#include <algorithm>

#include "fsdp/base/check.h"
#include "fsdp/base/durable_file.h"
#include "fsdp/base/json_fields.h"
#include "fsdp/checkpoint/format/tensor_catalog.h"
#include "fsdp/checkpoint/run_directory.h"

namespace fsdp {

namespace {

constexpr std::string_view kNames[] = {kModelConfigName,      "generation_config.json",
                                       "tokenizer.json",      "tokenizer_config.json",
                                       "tokenizer.model",     "special_tokens_map.json",
                                       "added_tokens.json",   "vocab.json",
                                       "vocab.txt",           "merges.txt",
                                       "chat_template.jinja", "chat_template.json",
                                       "spiece.model",        "tekken.json",
                                       "adapter_config.json"};

// Tokenizers have some 30 MB; a larger file than this is refused.
constexpr int64_t kMaxBytes = int64_t{1} << 30;

std::optional<Manifest> manifest_of(const std::string& checkpoint) {
  if (!path_exists(concat(checkpoint, "/", kManifestName))) return std::nullopt;
  return read_manifest(checkpoint);
}

constexpr std::pair<DType, std::string_view> kTorchNames[] = {{DType::kFloat64, "float64"},
                                                              {DType::kFloat32, "float32"},
                                                              {DType::kFloat16, "float16"},
                                                              {DType::kBFloat16, "bfloat16"},
                                                              {DType::kFloat8E4M3, "float8_e4m3fn"},
                                                              {DType::kFloat8E5M2, "float8_e5m2"},
                                                              {DType::kInt64, "int64"},
                                                              {DType::kInt32, "int32"},
                                                              {DType::kUInt8, "uint8"}};

std::string_view torch_name(DType dtype) {
  return std::find_if(std::begin(kTorchNames), std::end(kTorchNames),
                      [&](const auto& each) { return each.first == dtype; })
      ->second;
}

}  // namespace

bool is_model_file(std::string_view name) {
  return std::find(std::begin(kNames), std::end(kNames), name) != std::end(kNames);
}

std::optional<std::string> read_model_file(const std::string& checkpoint, const Manifest* manifest,
                                           std::string_view name) {
  const std::string directory = is_directory(checkpoint) ? checkpoint : directory_of(checkpoint);
  const std::string path = concat(directory, "/", name);
  if (manifest == nullptr) {
    if (!path_exists(path)) return std::nullopt;
    return read_text_file(path, kMaxBytes);
  }
  const auto file = std::find_if(manifest->files.begin(), manifest->files.end(),
                                 [&](const StoredFile& each) { return each.path == name; });
  if (file == manifest->files.end()) return std::nullopt;
  std::string text = read_text_file(path, kMaxBytes);
  FSDP_CHECK(described(file->path, text) == *file, path,
             " is not what was written; it is damaged, so use another checkpoint");
  return text;
}

std::optional<std::string> stored_model_config(const std::string& checkpoint) {
  const std::optional<Manifest> manifest = manifest_of(checkpoint);
  return read_model_file(checkpoint, manifest ? &*manifest : nullptr, kModelConfigName);
}

std::vector<ModelFile> stored_model_files(const std::string& checkpoint) {
  const std::optional<Manifest> manifest = manifest_of(checkpoint);
  std::vector<ModelFile> files;
  for (const std::string_view name : kNames)
    if (name != kModelConfigName)
      if (auto text = read_model_file(checkpoint, manifest ? &*manifest : nullptr, name))
        files.push_back({std::string(name), std::move(*text)});
  return files;
}

std::vector<StoredFile> write_model_files(const std::string& directory,
                                          std::span<const ModelFile> files) {
  std::vector<StoredFile> stored;
  for (const ModelFile& file : files) {
    FSDP_ASSERT(is_model_file(file.name), file.name);
    write_file_durably(concat(directory, "/", file.name), file.text);
    stored.push_back(described(file.name, file.text));
  }
  return stored;
}

std::string model_type_of(std::string_view config, const std::string& source) {
  const nlohmann::json document = parse_json(config, source);
  return JsonFields(document, source, "").text_or("model_type", "");
}

bool ties_word_embeddings(std::string_view config, const std::string& source) {
  const nlohmann::json document = parse_json(config, source);
  return JsonFields(document, source, "").boolean_or("tie_word_embeddings", false);
}

std::optional<DType> published_dtype(std::string_view config, const std::string& source) {
  const nlohmann::json document = parse_json(config, source);
  const JsonFields fields(document, source, "");  // checks that it is an object
  for (const char* field : {"dtype", "torch_dtype"}) {
    if (!fields.has(field)) continue;
    for (const DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16})
      if (document[field] == torch_name(dtype)) return dtype;
    return std::nullopt;
  }
  return std::nullopt;
}

std::string with_stored_dtype(std::string_view config, const std::string& source, DType dtype) {
  const nlohmann::json checked = parse_json(config, source);
  const JsonFields fields(checked, source, "");  // checks that it is an object
  // Parsed again, since only this type keeps the order of the fields.
  nlohmann::ordered_json document = nlohmann::ordered_json::parse(config);
  for (const char* field : {"torch_dtype", "dtype"}) document[field] = torch_name(dtype);
  return document.dump(2) + "\n";
}

}  // namespace fsdp
