// Writes tensors of another checkpoint: as a checkpoint cut for any number of ranks, or as
// HuggingFace's packages do (huggingface_files.h).
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "fsdp/checkpoint/format/model_files.h"
#include "fsdp/checkpoint/format/piece_writer.h"
#include "fsdp/checkpoint/format/tensor_stream.h"
#include "fsdp/checkpoint/tools/huggingface_files.h"

namespace fsdp {

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

// The part that rank `rank` of `ranks` writes of tensor `index` of its list: a flat range that is
// one box; it may be empty.
FlatRange share_of_rows(const StoredTensor& tensor, int64_t index, int64_t rank, int64_t ranks);

// Writes all of `directory`, manifest.json last, with one chunk in memory. `model` reads the
// model's tensors, `moments` the moments. Files are on the disk afterwards, their names are not
// (sync_tree).
void write_sharded_files(const std::string& directory, const ShardedContent& content,
                         ConvertedReads& model, ConvertedReads& moments,
                         const ShardedOptions& options = {});

// --- HuggingFace's files -------------------------------------------------------------------------

// Of the tensors as they are written.
DType main_dtype(std::span<const CatalogTensor> tensors, const ConvertedReads& reads);

// Writes the tensors in this order, with one chunk in memory. Files are on the disk afterwards,
// their names are not (sync_tree). Returns the names of the safetensors files.
std::vector<std::string> write_huggingface_files(const std::string& directory,
                                                 std::span<const CatalogTensor> tensors,
                                                 ConvertedReads& reads,
                                                 const HuggingFaceOptions& options);

}  // namespace fsdp
