// Writes tensors of another checkpoint: all, or those that are a model's weights; as a checkpoint
// cut for any number of ranks, or as HuggingFace's packages do.
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
#include "fsdp/checkpoint/format/model_files.h"
#include "fsdp/checkpoint/format/safetensors_file.h"
#include "fsdp/checkpoint/format/tensor_catalog.h"
#include "fsdp/checkpoint/format/tensor_stream.h"
#include "fsdp/layout/segment.h"

namespace fsdp {

// --- which tensors -------------------------------------------------------------------------------

// The tensors that config.json gives a model.
struct ExpectedWeights {
  std::string source;  // the path of the file, for errors
  std::vector<NamedShape> tensors;
  // A head that shares the embedding's weight is not in `tensors`, but files may have it.
  bool ties_head = false;
};

struct WeightSelection {
  std::vector<CatalogTensor> tensors;  // with the names and in the order of the files to be written
  std::vector<std::string> left_out;   // not weights, or a copy of the embedding
};

// All tensors, in the order in which they are stored.
WeightSelection select_all(const TensorCatalog& catalog, const TensorSet& model);

// Exactly the expected tensors. Finds one that is stored under another name of a shared parameter;
// leaves out the copy of a tied head, and tables that old files hold beside weights. Throws an
// Error with all that is missing, too much or of another shape, and for a tied head whose values
// differ from the embedding. `rules` are those that were applied to `model`.
WeightSelection select_weights(const TensorCatalog& catalog, const TensorSet& model,
                               const ExpectedWeights& expected, const NameRules& rules = {});

// The sections that rules make of tensors, in the order of the tensors.
std::vector<CatalogTensor> apply_in_order(const NameRules& rules,
                                          std::span<const CatalogTensor> tensors);

// --- a checkpoint --------------------------------------------------------------------------------

// The content of the new checkpoint.
struct ShardedContent {
  std::vector<CatalogTensor> model;
  std::vector<CatalogTensor> moments = {};
  // config.json and the other files the model is published with.
  std::vector<ModelFile> model_files = {};
  // Step, optimizer, units and texts; mesh, tensors and files are filled in.
  Manifest manifest = {};
  // Random states and data positions; used if the number of ranks is the same.
  std::vector<RankRecord> ranks = {};
};

struct ShardedOptions {
  // Writers, each with files of its own. Matrices are cut between rows, other tensors never.
  int64_t ranks = 1;
  WriteOptions write = {};
};

// Writes all of `directory`, manifest.json last, with one chunk in memory. `model` reads the
// model's tensors, `moments` the moments. Files are on the disk afterwards, their names are not
// (sync_tree).
void write_sharded_files(const std::string& directory, const ShardedContent& content,
                         ConvertedReads& model, ConvertedReads& moments,
                         const ShardedOptions& options = {});

// --- HuggingFace's files -------------------------------------------------------------------------

// Writes weights the way HuggingFace's packages do: whole tensors in files of a bounded size.
//
//   model.safetensors                      where one file is enough, otherwise
//   model-00001-of-00003.safetensors ...
//   model.safetensors.index.json           which tensor is in which file
//   config.json                            where it is known
//   tokenizer.json ...                     and other files the model is published with

struct HuggingFaceOptions {
  // Limit for the tensors in one file. A larger tensor gets a file of its own.
  int64_t max_file_bytes = 5'000'000'000;
  // The text of config.json.
  std::optional<std::string> config = std::nullopt;
  // Other files the model is published with.
  std::vector<ModelFile> model_files = {};
  std::string name = "model";  // of the files with tensors
};

// The type with the most bytes, which config.json names.
DType main_dtype(std::span<const StoredTensor> tensors);

// Takes the tensors of a list one after the other, in any number of chunks; keeps none of them.
class HuggingFaceFiles {
 public:
  HuggingFaceFiles(std::string directory, std::vector<StoredTensor> tensors,
                   HuggingFaceOptions options);

  // The bytes that follow, of tensor after tensor.
  void write(std::span<const std::byte> bytes);

  // After the last tensor: writes the files beside those with tensors. All are on the disk
  // afterwards, their names are not (sync_tree). Returns the names of the safetensors files.
  std::vector<std::string> finish();

 private:
  void open_next();

  const std::string directory_;
  const std::vector<StoredTensor> tensors_;
  const HuggingFaceOptions options_;
  std::vector<FlatRange> files_;    // tensors of each
  std::vector<std::string> names_;  // of each
  std::optional<SafetensorsWriter> writer_;
  size_t num_opened_ = 0;
};

// The type with the most bytes of the tensors as they are written.
DType main_dtype(std::span<const CatalogTensor> tensors, const ConvertedReads& reads);

// Writes the tensors in this order, with one chunk in memory. Files are on the disk afterwards,
// their names are not (sync_tree). Returns the names of the safetensors files.
std::vector<std::string> write_huggingface_files(const std::string& directory,
                                                 std::span<const CatalogTensor> tensors,
                                                 ConvertedReads& reads,
                                                 const HuggingFaceOptions& options);

}  // namespace fsdp
