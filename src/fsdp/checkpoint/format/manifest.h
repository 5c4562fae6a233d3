// The description of a checkpoint: manifest.json, written last, by rank 0.
#pragma once

#include <cstdint>
#include <map>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "fsdp/base/dtype.h"
#include "fsdp/layout/segment.h"
#include "fsdp/layout/strategy.h"

namespace fsdp {

class JsonFields;

// Readers refuse a higher version. A new field that old readers may ignore does not raise it.
// Manifests have a checksum from version 2 on (with_checksum).
inline constexpr int64_t kCheckpointVersion = 2;

// No run has more steps, so that sums of such numbers cannot overflow.
inline constexpr int64_t kMaxStoredSteps = 1'000'000'000'000;

// A reader verifies whole blocks, so it may have to hold this much in memory.
inline constexpr int64_t kMaxBlockBytes = int64_t{1} << 30;

// A whole stored tensor, whichever ranks wrote its parts.
struct StoredTensor {
  std::string name;
  DType dtype = DType::kFloat32;
  std::vector<int64_t> shape;

  friend bool operator==(const StoredTensor&, const StoredTensor&) = default;
};

// The model's description for other tools, as models are published with it (model_files.h).
inline constexpr std::string_view kModelConfigName = "config.json";

struct StoredFile {
  std::string path;  // below the checkpoint, with '/'
  int64_t bytes = 0;
  uint32_t crc32c = 0;

  friend bool operator==(const StoredFile&, const StoredFile&) = default;
};

// How the model was cut when it was saved: for people and tools; loading does not need it.
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

// The optimizer's facts, beside its tensors.
struct OptimizerRecord {
  std::string name;                  // "AdamW"; empty: the checkpoint has none
  std::vector<std::string> moments;  // "exp_avg", ...: suffixes of the parameter's name
  int64_t step = 0;
  int64_t skipped = 0;
  double loss_scale = 1.0;
  int64_t good_steps = 0;
  std::string settings = {};  // the program's text about its numbers; not in older checkpoints
  // Parameters that were updated less often than `step` says, by their names in `units`.
  std::map<std::string, int64_t> late_updates = {};

  friend bool operator==(const OptimizerRecord&, const OptimizerRecord&) = default;
};

struct Manifest {
  int64_t step = 0;
  MeshShape mesh;         // of the ranks that wrote the checkpoint
  int64_t sum_group = 0;  // Mesh::sum_group() of their run; 0: not in older checkpoints
  std::string strategy;   // to_text(Strategy)
  std::string precision;  // for people: "main_params fp32, main_grads bf16, ..."
  std::string schedule;   // the program's text about its learning-rate schedule
  OptimizerRecord optimizer;
  std::vector<UnitRecord> units;
  std::vector<StoredTensor> model;
  std::vector<StoredTensor> moments;
  std::vector<StoredFile> files;  // all files except manifest.json

  int64_t num_ranks() const { return mesh.outer * mesh.inner; }

  friend bool operator==(const Manifest&, const Manifest&) = default;
};

std::string to_json(const Manifest& manifest);

// Throws an Error that names `source`, the field and the fault: a changed byte, a higher version, a
// field that is missing or of the wrong kind, a path that leads out of the checkpoint, a file or
// tensor that is listed twice.
Manifest parse_manifest(std::string_view json, const std::string& source);

// The files one rank wrote: ranks/NNNNN.json, which the rank writes last.
struct RankRecord {
  struct File {
    std::string path;
    int64_t bytes = 0;
    int64_t header_bytes = 0;  // from byte 0; all readers read the header, few a whole block
    uint32_t header_crc32c = 0;
    std::vector<uint32_t>
        blocks;  // the CRC32C of each block_bytes of the file; the last is shorter

    friend bool operator==(const File&, const File&) = default;
  };
  int64_t rank = 0;
  int64_t block_bytes = 0;
  std::vector<File> files;
  std::string random_state;   // of the rank's random number generators, as bytes
  std::string data_position;  // the program's text: how far the rank has read its data

  friend bool operator==(const RankRecord&, const RankRecord&) = default;
};

std::string to_json(const RankRecord& record);
RankRecord parse_rank_record(std::string_view json, const std::string& source);

// "00003": in the names of a rank's files.
std::string rank_text(int64_t rank);
// "00000100": in the names of checkpoints and patches.
std::string step_text(int64_t step);
// "ranks/00003.json"
std::string rank_record_path(int64_t rank);

// The checksum of a whole file, from those of its blocks.
uint32_t crc32c_of(const RankRecord::File& file, int64_t block_bytes);

// A file with this text.
StoredFile described(std::string path, std::string_view text);

// Adds a rank's files, its record with this text included.
void list_files(const RankRecord& record, std::string_view text, std::vector<StoredFile>& files);

// --- parts that records of patches have, too -----------------------------------------------------

nlohmann::ordered_json json_of(std::span<const StoredFile> files);

// The list "files"; no file twice.
std::vector<StoredFile> stored_files(const JsonFields& fields);

// The field "path": a foreign manifest must not choose other files to open.
std::string stored_path(const JsonFields& fields);

// From 0 to kMaxStoredSteps.
int64_t stored_steps(const JsonFields& fields, const char* field);

// The field "shape", whose bytes fit 63 bits in every type.
std::vector<int64_t> stored_shape(const JsonFields& fields);

// --- bytes as text -------------------------------------------------------------------------------

std::string base64(std::string_view bytes);

// nullopt for a text that base64() does not write.
std::optional<std::string> from_base64(std::string_view text);

// --- paths that may be opened --------------------------------------------------------------------

// "model/00000-0.safetensors": leads from a directory to something below it, in one spelling only.
// No "..", ".", doubled or trailing "/", absolute path, backslash or control character.
bool is_plain_path(std::string_view path);

// One part of such a path.
bool is_plain_name(std::string_view name);

// --- the checksum at the end ---------------------------------------------------------------------

enum class ManifestChecksum : uint8_t { kAbsent, kRight, kWrong };

// `text` is a JSON object that ends with "\n}\n", as manifests do. Adds the field "crc32c", the
// CRC32C of `text`, in place of an older one.
std::string with_checksum(std::string_view text);

// Compares bytes, not values: a text with other white space does not match.
ManifestChecksum checksum_in(std::string_view text);

}  // namespace fsdp
