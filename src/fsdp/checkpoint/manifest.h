// What a checkpoint says about itself: manifest.json, written last, by rank 0.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "fsdp/base/dtype.h"
#include "fsdp/layout/placement.h"
#include "fsdp/layout/segment.h"

namespace fsdp {

// Readers refuse a higher one. A field that old readers may ignore does not raise it. Manifests
// have a checksum from version 2 on (manifest_checksum.h).
inline constexpr int64_t kCheckpointVersion = 2;

// No run has more steps; numbers up to it can be added without a thought.
inline constexpr int64_t kMaxStoredSteps = 1'000'000'000'000;

// Only whole blocks can be verified, so this is what a reader may have to hold in memory.
inline constexpr int64_t kMaxBlockBytes = int64_t{1} << 30;

// A whole tensor as it is stored, whoever wrote which part of it.
struct StoredTensor {
  std::string name;
  DType dtype = DType::kFloat32;
  std::vector<int64_t> shape;

  friend bool operator==(const StoredTensor&, const StoredTensor&) = default;
};

// The model's description for other tools, as it is published with models (model_files.h).
inline constexpr std::string_view kModelConfigName = "config.json";

struct StoredFile {
  std::string path;  // below the checkpoint, with '/'
  int64_t bytes = 0;
  uint32_t crc32c = 0;

  friend bool operator==(const StoredFile&, const StoredFile&) = default;
};

// How the model was cut when it was saved: for people and for tools; loading needs none of it.
struct GroupRecord {
  struct Member {
    std::string name;
    std::vector<std::string> aliases;  // further names of a shared parameter
    std::vector<int64_t> shape;
    FlatRange flat;  // in the group's buffer

    friend bool operator==(const Member&, const Member&) = default;
  };
  DType dtype = DType::kFloat32;  // of the weights that compute
  bool is_trainable = true;
  std::string granularity;
  int64_t padded_numel = 0;
  std::vector<Member> members;

  friend bool operator==(const GroupRecord&, const GroupRecord&) = default;
};
struct UnitRecord {
  std::string name;
  std::vector<GroupRecord> groups;

  friend bool operator==(const UnitRecord&, const UnitRecord&) = default;
};

// Of the optimizer, beside its tensors.
struct OptimizerRecord {
  std::string name;                  // "AdamW"; empty: there is none in the checkpoint
  std::vector<std::string> moments;  // "exp_avg", ...: what follows the parameter's name
  int64_t step = 0;
  int64_t skipped = 0;
  double loss_scale = 1.0;
  int64_t good_steps = 0;

  friend bool operator==(const OptimizerRecord&, const OptimizerRecord&) = default;
};

struct Manifest {
  int64_t step = 0;
  MeshShape mesh;         // of the ranks that wrote it
  std::string strategy;   // to_text(Strategy)
  std::string precision;  // for people: "main_params fp32, main_grads bf16, ..."
  std::string schedule;   // what the program gave: its learning-rate schedule, in words of its own
  OptimizerRecord optimizer;
  std::vector<UnitRecord> units;
  std::vector<StoredTensor> model;
  std::vector<StoredTensor> moments;
  std::vector<StoredFile> files;  // all but manifest.json itself

  int64_t num_ranks() const { return mesh.outer * mesh.inner; }

  friend bool operator==(const Manifest&, const Manifest&) = default;
};

std::string to_json(const Manifest& manifest);

// Error that names `source`, the field and what is wrong: a byte that is not what was written, a
// higher version, a field that is missing or of the wrong kind, a path that leads out of the
// checkpoint, a file or tensor that is there twice.
Manifest parse_manifest(std::string_view json, const std::string& source);

// What one rank wrote: ranks/NNNNN.json, its last act.
struct RankRecord {
  struct File {
    std::string path;
    int64_t bytes = 0;
    int64_t header_bytes = 0;  // from the first byte on: everybody reads it, few read a whole block
    uint32_t header_crc32c = 0;
    std::vector<uint32_t>
        blocks;  // the CRC32C of each block_bytes of the file; the last is shorter

    friend bool operator==(const File&, const File&) = default;
  };
  int64_t rank = 0;
  int64_t block_bytes = 0;
  std::vector<File> files;
  std::string random_state;   // of the rank's random number generators, as bytes
  std::string data_position;  // what the program gave: how far the rank has read its data

  friend bool operator==(const RankRecord&, const RankRecord&) = default;
};

std::string to_json(const RankRecord& record);
RankRecord parse_rank_record(std::string_view json, const std::string& source);

// "00003": in the names of a rank's files.
std::string rank_text(int64_t rank);
// "ranks/00003.json"
std::string rank_record_path(int64_t rank);

// Of a whole file, from its blocks.
uint32_t crc32c_of(const RankRecord::File& file, int64_t block_bytes);

}  // namespace fsdp
