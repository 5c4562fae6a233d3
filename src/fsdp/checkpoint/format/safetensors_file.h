// Safetensors files: the header, which says where tensors lie; one writer for whoever writes them;
// and the files of a rank.
//
//   8 bytes, little-endian: the length n of the header
//   n bytes: a JSON object; {"name": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
//   ...},
//            and under "__metadata__" strings by name
//   the data, to which offsets refer
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "fsdp/base/dtype.h"
#include "fsdp/base/durable_file.h"
#include "fsdp/checkpoint/checkpoint_options.h"
#include "fsdp/checkpoint/format/manifest.h"
#include "fsdp/layout/box.h"

namespace fsdp {

// "F32", "BF16", "F8_E4M3", ...
std::string_view safetensors_name(DType dtype);
std::optional<DType> parse_safetensors_dtype(std::string_view name);

struct SafetensorsEntry {
  std::string name;
  DType dtype = DType::kFloat32;
  std::vector<int64_t> shape;
  int64_t begin = 0;  // in the data, in bytes
  int64_t end = 0;

  friend bool operator==(const SafetensorsEntry&, const SafetensorsEntry&) = default;
};

struct SafetensorsHeader {
  std::vector<SafetensorsEntry> tensors;        // in the order of their data
  std::map<std::string, std::string> metadata;  // "__metadata__"
  int64_t data_begin = 0;                       // in the file

  friend bool operator==(const SafetensorsHeader&, const SafetensorsHeader&) = default;
};

// The part of a tensor that a file has: {"name": {"saved_offsets": [2, 0]}, ...} in the metadata.
inline constexpr const char* kShardingInfo = "DCP_SHARDING_INFO";

// The limit of other readers; a longer header is refused.
inline constexpr int64_t kMaxSafetensorsHeaderBytes = 100'000'000;

// The length of the header, from the first 8 bytes of a file of `file_bytes`. Throws an Error that
// begins with `source` if the length is impossible.
int64_t safetensors_header_bytes(std::string_view first_8_bytes, int64_t file_bytes,
                                 const std::string& source);

// The first 8 bytes of an open file and the n after them.
std::string safetensors_header_text(const FileReader& file);

// Reads the n bytes after those 8. Tensors must cover the data from its first to its last byte,
// without holes or overlaps. Each kind of defect has an Error of its own, which names `source`, the
// tensor and the defect.
SafetensorsHeader parse_safetensors_header(std::string_view header, int64_t file_bytes,
                                           const std::string& source);

// The first bytes of a file with these tensors, 8 for the length included; fills in begin, end and
// data_begin in the order of the list. Pads with spaces so that the data begins at a multiple of
// `align_bytes`. UsageError for names that are given twice.
std::string write_safetensors_header(SafetensorsHeader& header, int64_t align_bytes = 128);

// --- writing a file ------------------------------------------------------------------------------

class SafetensorsWriter {
 public:
  // Creates the file and writes its header. Each `block_bytes` of the file get a checksum.
  SafetensorsWriter(const std::string& path, SafetensorsHeader header,
                    int64_t block_bytes = kMaxBlockBytes);

  // The data that follows, in the order of the header.
  void write(std::span<const std::byte> bytes);

  bool is_full() const { return file_.bytes() == record_.bytes; }

  // After all data: returns when the disk has it. `name`: for the record.
  RankRecord::File commit(std::string name);

 private:
  void end_block();

  FileWriter file_;
  const int64_t block_bytes_;
  uint32_t block_ = 0;
  int64_t block_filled_ = 0;
  RankRecord::File record_;
};

// --- a rank's files ------------------------------------------------------------------------------

// A box of a stored tensor, and functions that give its elements.
struct Piece {
  std::string name;  // of the whole stored tensor
  DType dtype = DType::kFloat32;
  Box box;
  // Copies elements [range) of the box, counted row by row, to `into`.
  std::function<void(FlatRange range, std::byte* into)> read;
  // The address of these elements, if they are contiguous in memory; else nullptr.
  std::function<const std::byte*(FlatRange range)> in_memory = {};
};

// The pieces that one rank writes to one folder: "model", "optimizer".
struct FolderPieces {
  std::string folder;
  std::span<const Piece> pieces;
};

// Writes `directory`/`folder`/NNNNN-K.safetensors for this rank; the files are on the disk when it
// returns. Readers expect one tensor per name and file, so the second box of a tensor goes to file
// K = 1, the third to K = 2, ...
std::vector<RankRecord::File> write_pieces(const std::string& directory, int64_t rank,
                                           const std::vector<FolderPieces>& folders,
                                           const WriteOptions& options);

}  // namespace fsdp
