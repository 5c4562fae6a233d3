// The tensors of a checkpoint, and where their parts lie in its files.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "fsdp/checkpoint/format/manifest.h"
#include "fsdp/checkpoint/format/tensor_boxes.h"
#include "fsdp/checkpoint/names/name_rules.h"

namespace fsdp {

// A file and, if it has them, the checksums of its blocks. Not kept open, because there may be more
// files than a process may open.
struct CheckedFile {
  std::string path;
  int64_t bytes = 0;
  int64_t block_bytes = 0;  // 0: there are none
  int64_t header_bytes = 0;
  uint32_t header_crc32c = 0;
  std::vector<uint32_t> blocks = {};
};

// A part of a tensor. Positions count elements from the first byte of the tensor's data in the
// file.
struct StoredBox {
  StridedBox place;
  size_t file = 0;         // in CheckpointFiles
  int64_t data_begin = 0;  // in the file, in bytes
};

struct CatalogTensor {
  StoredTensor tensor;
  std::vector<StoredBox> boxes;  // together exactly the tensor
};

// By name.
using TensorSet = std::map<std::string, CatalogTensor>;

// An open checkpoint: all headers are read and checked, but no data.
class TensorCatalog {
 public:
  // A directory with manifest.json, or safetensors files of other tools: one, or a directory of
  // them with or without an index. Throws an Error with all faults, up to 20 names.
  explicit TensorCatalog(const std::string& path);

  const std::string& path() const { return path_; }
  // nullopt: another tool wrote the files.
  const std::optional<Manifest>& manifest() const { return manifest_; }
  // One per rank that wrote the checkpoint.
  const std::vector<RankRecord>& ranks() const { return ranks_; }
  const std::vector<CheckedFile>& files() const { return files_; }

  const TensorSet& model() const { return model_; }
  const TensorSet& moments() const { return moments_; }

  // The text of config.json, which describes the model to other tools: a file of the checkpoint, or
  // beside the files of other tools. nullopt: there is none. Error if it is damaged.
  std::optional<std::string> model_config() const;

 private:
  void open_ours();
  void open_plain();
  struct FileOfSet {
    CheckedFile file;
    TensorSet* set;
  };
  struct ReadHeader;
  static ReadHeader read_header(const CheckedFile& file);
  void add_files(std::vector<FileOfSet> files);
  void add_file(CheckedFile file, const ReadHeader& read, TensorSet& set);

  std::string path_;
  std::optional<Manifest> manifest_;
  std::vector<RankRecord> ranks_;
  std::vector<CheckedFile> files_;
  TensorSet model_;
  TensorSet moments_;
};

// The manifest of the checkpoint in this directory, and its text.
Manifest read_manifest(const std::string& path);
std::string read_manifest_text(const std::string& path);

// Whether the manifest, or a file that the model is published with, is not what was written; false
// for a manifest of a later version.
bool has_damaged_description(const std::string& path);

// Whether a checkpoint cannot be opened because of such damage, or of damage to ranks' records or
// headers of files.
bool has_damaged_headers(const std::string& path);

// Tensors under the names that the rules give them: a fused tensor becomes its sections.
// Names end with one of `suffixes` (".exp_avg"), which the rules do not see.
TensorSet apply(const NameRules& rules, TensorSet set, std::span<const std::string> suffixes = {});

// The moments under the names that the rules give their parameters, without what checkpoints of
// earlier versions have beside them (histories of amaxes).
TensorSet moments_of(const TensorCatalog& catalog, const NameRules& rules);

// Every other name of a shared parameter -> the one it is stored under; both after the rules.
std::map<std::string, std::string> names_of_shared(const TensorCatalog& catalog,
                                                   const NameRules& rules);

// "'a', 'b' and 17 more": at most 20.
std::string some_of(std::span<const std::string> names);

}  // namespace fsdp
