// Which files are the text that paths name, in an order that depends on their names alone, and
// whether a file is text at all.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace fsdp {

enum class FileContent : uint8_t { kText, kJsonLines, kParquet, kNotUtf8, kBinary };

// What a file is, and whether it holds text that a model can be trained on.
struct JudgedFile {
  FileContent content = FileContent::kText;
  // What it is and how its text is got, e.g. "is an Arrow file; ..."; "" for one that can be read.
  std::string problem = {};
};

// Judges a regular file of `file_bytes` by its first 64 KiB. Text is UTF-8 without zero bytes.
JudgedFile judge_file(const std::string& path, int64_t file_bytes);

// How much of directories is no text.
struct LeftOut {
  int64_t num_hidden = 0;  // files and directories whose names begin with a dot
  int64_t num_binary = 0;  // files of a known format other than text, or with a zero byte
  int64_t num_not_utf8 = 0;
  int64_t num_json_lines = 0;  // without the fields of row_kind()
  int64_t num_empty = 0;
  int64_t num_other = 0;  // devices, pipes, links to nothing

  int64_t total() const {
    return num_hidden + num_binary + num_not_utf8 + num_json_lines + num_empty + num_other;
  }
  LeftOut& operator+=(const LeftOut& more);
  bool operator==(const LeftOut&) const = default;
};

enum class FileForm : uint8_t { kText, kJsonLines, kParquet };

struct TextFile {
  std::string path;
  FileForm form = FileForm::kText;
  bool has_mask = false;  // its rows have parts that are not learnt
};

struct TextFiles {
  std::vector<TextFile> files;
  int64_t bytes = 0;  // of all of them
  LeftOut left_out = {};

  bool has_mask() const;
};

// What files that are named, and not found in a directory, may hold.
enum class NamedFiles : uint8_t { kText, kAnyBytes };

struct TextFileOptions {
  NamedFiles named = NamedFiles::kText;
  std::string field = {};  // of rows; see row_kind()
};

// A directory stands for the files in and below it, sorted by their paths, byte by byte. Links are
// followed, and no directory is entered twice for one path. Paths stay in the order given. What
// judge_file() says is no text is left out of directories, and an Error where it is named. So is a
// path that is missing, cannot be read, or names a directory without text. Of directories, JSON
// lines without known fields and parquet files are left out, too.
TextFiles find_text_files(std::span<const std::string> paths, const TextFileOptions& options = {});

// "2 hidden, 1 binary"; "" for nothing.
std::string to_text(const LeftOut& left_out);

}  // namespace fsdp
