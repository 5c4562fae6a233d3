// Writes a checkpoint from tensors that are stored elsewhere, cut for any number of ranks.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "fsdp/checkpoint/converted_reads.h"
#include "fsdp/checkpoint/model_files.h"
#include "fsdp/checkpoint/piece_writer.h"

namespace fsdp {

// What the checkpoint is to hold.
struct ShardedContent {
  std::vector<CatalogTensor> model;
  std::vector<CatalogTensor> moments = {};
  // config.json and what else the model is published with.
  std::vector<ModelFile> model_files = {};
  // Step, optimizer, units and words; mesh, tensors and files are filled in.
  Manifest manifest = {};
  // Random states and data positions; used if as many ranks are written.
  std::vector<RankRecord> ranks = {};
};

struct ShardedOptions {
  // Writers, each with files of its own. Matrices are cut between rows, other tensors not at all.
  int64_t ranks = 1;
  WriteOptions write = {};
};

// What rank `rank` of `ranks` writes of the tensor that is number `index` of its list: a flat range
// that is one box; empty for nothing.
FlatRange share_of_rows(const StoredTensor& tensor, int64_t index, int64_t rank, int64_t ranks);

// All of `directory`, manifest.json last, with a chunk in memory. `model` reads the model's
// tensors, `moments` the moments. Files are on the disk afterwards, their names are not
// (sync_tree).
void write_sharded_files(const std::string& directory, const ShardedContent& content,
                         ConvertedReads& model, ConvertedReads& moments,
                         const ShardedOptions& options = {});

}  // namespace fsdp
