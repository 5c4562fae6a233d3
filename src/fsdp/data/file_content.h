// Whether a file is text that a model can be trained on, judged by its first 64 KiB.
#pragma once

#include <cstdint>
#include <string>

namespace fsdp {

enum class FileContent : uint8_t { kText, kNotUtf8, kJsonLines, kBinary };

struct JudgedFile {
  FileContent content = FileContent::kText;
  // What it is and how its text is got, e.g. "is a parquet file; ..."; "" for text.
  std::string problem = {};
};

// Reads a regular file of `file_bytes`. Text is UTF-8 without zero bytes; lines that are JSON
// objects hold text, but are none.
JudgedFile judge_file(const std::string& path, int64_t file_bytes);

}  // namespace fsdp
