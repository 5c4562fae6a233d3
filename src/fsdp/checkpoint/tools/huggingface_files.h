// Writes weights the way HuggingFace's packages do: whole tensors in files of a bounded size.
//
//   model.safetensors                      where one file is enough, otherwise
//   model-00001-of-00003.safetensors ...
//   model.safetensors.index.json           which tensor is in which file
//   config.json                            where it is known
//   tokenizer.json ...                     and other files the model is published with
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "fsdp/base/dtype.h"
#include "fsdp/base/durable_file.h"
#include "fsdp/checkpoint/checkpoint_options.h"
#include "fsdp/checkpoint/format/manifest.h"
#include "fsdp/layout/segment.h"

namespace fsdp {

struct HuggingFaceOptions {
  // Limit for the tensors in one file. A larger tensor gets a file of its own.
  int64_t max_file_bytes = 5'000'000'000;
  // The text of config.json.
  std::optional<std::string> config = std::nullopt;
  // Other files the model is published with.
  std::vector<ModelFile> model_files = {};
};

// Consecutive tensors for each file, as many as fit: positions [begin, end).
std::vector<FlatRange> divide_into_files(std::span<const int64_t> tensor_bytes,
                                         int64_t max_file_bytes);

// The type with the most bytes, which config.json names.
DType main_dtype(std::span<const StoredTensor> tensors);

// Takes the tensors of a list one after the other, in any number of chunks; keeps none of them.
class HuggingFaceFiles {
 public:
  HuggingFaceFiles(std::string directory, std::vector<StoredTensor> tensors,
                   HuggingFaceOptions options);

  // Begins the next tensor of the list, after all bytes of the one before.
  void next();
  // The bytes that follow, of this tensor.
  void write(std::span<const std::byte> bytes);

  // After the last tensor: writes the files beside those with tensors. All are on the disk
  // afterwards, their names are not (sync_tree). Returns the names of the safetensors files.
  std::vector<std::string> finish();

 private:
  void open_file();
  void close_file();

  const std::string directory_;
  const std::vector<StoredTensor> tensors_;
  const HuggingFaceOptions options_;
  std::vector<FlatRange> files_;    // tensors of each
  std::vector<std::string> names_;  // of each
  std::optional<FileWriter> writer_;
  int64_t num_begun_ = 0;   // tensors
  int64_t num_opened_ = 0;  // files
  int64_t left_bytes_ = 0;  // of the tensor that was begun
};

}  // namespace fsdp
