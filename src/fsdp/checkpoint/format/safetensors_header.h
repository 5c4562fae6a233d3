// The header of a safetensors file: its tensors, and where they lie.
//
//   8 bytes, little-endian: the length n of the header
//   n bytes: a JSON object; {"name": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
//   ...},
//            and under "__metadata__" strings by name
//   the data, to which offsets refer
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "fsdp/base/dtype.h"

namespace fsdp {

// "F32", "BF16", "F8_E4M3", ...
std::string_view safetensors_name(DType dtype);

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

// The limit of other readers; a longer header is refused.
inline constexpr int64_t kMaxSafetensorsHeaderBytes = 100'000'000;

// The length of the header, from the first 8 bytes of a file of `file_bytes`. Throws an Error that
// begins with `source` if the length is impossible.
int64_t safetensors_header_bytes(std::string_view first_8_bytes, int64_t file_bytes,
                                 const std::string& source);

// Reads the n bytes after those. Tensors must cover the data from its first to its last byte,
// without holes or overlaps. Each kind of defect has an Error of its own, which names `source`, the
// tensor and the defect.
SafetensorsHeader parse_safetensors_header(std::string_view header, int64_t file_bytes,
                                           const std::string& source);

// The first bytes of a file with these tensors, 8 for the length included; fills in begin, end and
// data_begin in the order of the list. Pads with spaces so that the data begins at a multiple of
// `align_bytes`. UsageError for names that are given twice.
std::string write_safetensors_header(SafetensorsHeader& header, int64_t align_bytes = 128);

}  // namespace fsdp
