// The files a model is published with beside its weights: config.json, those of its tokenizer, its
// settings for generation. Checkpoints keep them, so that an export is as complete as the model the
// run began with. This project reads only config.json.
#pragma once

#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "fsdp/base/dtype.h"
#include "fsdp/checkpoint/checkpoint_options.h"
#include "fsdp/checkpoint/format/manifest.h"

namespace fsdp {

// Whether this is a known model file: the only files of a checkpoint that no rank's record lists.
bool is_model_file(std::string_view name);

// A file of the checkpoint with this manifest; without one (nullptr), a file beside those of other
// tools: in a directory, or beside the given file. nullopt: there is none. Throws an Error if the
// file differs from the manifest.
std::optional<std::string> read_model_file(const std::string& checkpoint, const Manifest* manifest,
                                           std::string_view name);

// Without a manifest at hand: config.json, and all other model files.
std::optional<std::string> stored_model_config(const std::string& checkpoint);
std::vector<ModelFile> stored_model_files(const std::string& checkpoint);

// Writes the files to the disk and returns their entries for the manifest.
std::vector<StoredFile> write_model_files(const std::string& directory,
                                          std::span<const ModelFile> files);

// --- what config.json says -----------------------------------------------------------------------

// "model_type"; "" if there is no such field. Throws a UsageError that begins with `source` if the
// text is not a JSON object.
std::string model_type_of(std::string_view config, const std::string& source);

// "tie_word_embeddings": whether the head shares the embedding's weight. Default: no.
bool ties_word_embeddings(std::string_view config, const std::string& source);

// "dtype", or "torch_dtype" as it was called before: the type that the model is published in.
// nullopt if there is none, or weights are not converted to it.
std::optional<DType> published_dtype(std::string_view config, const std::string& source);

// The text with the type of the stored weights. It is written as "torch_dtype", which every
// version of the transformers package reads, and as "dtype", which later versions write and prefer
// if both are there.
std::string with_stored_dtype(std::string_view config, const std::string& source, DType dtype);

}  // namespace fsdp
