// The files a model is published with beside its weights: config.json, those of its tokenizer, its
// settings for generation. Checkpoints keep them, so that an export is as complete as the model the
// run began with. Only config.json is ever looked into.
#pragma once

#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "fsdp/checkpoint/manifest.h"

namespace fsdp {

struct ModelFile {
  std::string name;  // "tokenizer.json"
  std::string text;

  friend bool operator==(const ModelFile&, const ModelFile&) = default;
};

// The names that are known; of all files in a checkpoint, only these no rank wrote.
bool is_model_file(std::string_view name);

// Of a checkpoint with this manifest, or (nullptr) from beside the files of other tools: a
// directory, or one of its files. nullopt: there is none. Error where it is not what the manifest
// says.
std::optional<std::string> read_model_file(const std::string& checkpoint, const Manifest* manifest,
                                           std::string_view name);

// The same, without a manifest at hand: config.json, and all others that are there.
std::optional<std::string> stored_model_config(const std::string& checkpoint);
std::vector<ModelFile> stored_model_files(const std::string& checkpoint);

// Returns what a manifest says about them. They are on the disk afterwards.
std::vector<StoredFile> write_model_files(const std::string& directory,
                                          std::span<const ModelFile> files);

}  // namespace fsdp
