// Writes weights the way HuggingFace's packages do: whole tensors in files of a bounded size.
//
//   model.safetensors                      where one file is enough, otherwise
//   model-00001-of-00003.safetensors ...
//   model.safetensors.index.json           which tensor is in which file
//   config.json                            where it is known
//   tokenizer.json ...                     and what else the model is published with
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "fsdp/checkpoint/converted_reads.h"
#include "fsdp/checkpoint/model_files.h"

namespace fsdp {

struct HuggingFaceOptions {
  // Of the tensors in one file. A larger tensor has a file of its own.
  int64_t max_file_bytes = 5'000'000'000;
  // The text of config.json.
  std::optional<std::string> config = std::nullopt;
  // What else the model is published with.
  std::vector<ModelFile> model_files = {};
};

// Consecutive tensors, as many as fit, in each file: positions [begin, end).
std::vector<FlatRange> divide_into_files(std::span<const int64_t> tensor_bytes,
                                         int64_t max_file_bytes);

// The type of most bytes, which config.json names.
DType main_dtype(std::span<const CatalogTensor> tensors, const ConvertedReads& reads);

// Tensors in this order, with a chunk of them in memory. Files are on the disk afterwards, their
// names are not (sync_tree). Returns the names of the safetensors files.
std::vector<std::string> write_huggingface_files(const std::string& directory,
                                                 std::span<const CatalogTensor> tensors,
                                                 ConvertedReads& reads,
                                                 const HuggingFaceOptions& options);

}  // namespace fsdp
