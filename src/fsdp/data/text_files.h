// Which files are the text that paths name, in an order that depends on their names alone, and
// whether a file is text at all.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace fsdp {

// The kind of a regular file, by its first 64 KiB. Text is UTF-8 without zero bytes. A model can be
// trained on the first four, of which all but text are rows.
enum class FileContent : uint8_t { kText, kJsonLines, kJsonArray, kParquet, kNotUtf8, kBinary };

// How much of directories is no text.
struct LeftOut {
  int64_t num_hidden = 0;  // files and directories whose names begin with a dot
  int64_t num_binary = 0;  // files of a known format other than text, or with a zero byte
  int64_t num_not_utf8 = 0;
  int64_t num_rows = 0;  // files of rows without the fields of row_kind(), or JSON without rows
  int64_t num_beside_rows = 0;    // text, such as the README of a data set
  std::string first_beside_rows;  // the path of one
  int64_t num_empty = 0;
  int64_t num_other = 0;  // devices, pipes, links to nothing

  int64_t total() const {
    return num_hidden + num_binary + num_not_utf8 + num_rows + num_beside_rows + num_empty +
           num_other;
  }
  LeftOut& operator+=(const LeftOut& more);
  bool operator==(const LeftOut&) const = default;
};

struct TextFile {
  std::string path;
  FileContent content = FileContent::kText;
  bool has_mask = false;  // its rows have parts that are not learnt
  int64_t bytes = 0;      // of the file, in directories
};

struct TextFiles {
  std::vector<TextFile> files;
  int64_t bytes = 0;  // of all of them
  LeftOut left_out = {};

  bool has_mask() const;
};

// The kinds of files that may be named, beside those found in a directory.
enum class NamedFiles : uint8_t { kText, kAnyBytes };

struct TextFileOptions {
  NamedFiles named = NamedFiles::kText;
  std::string field = {};  // of rows; see row_kind()
};

// A directory stands for the files in and below it, sorted by their paths, byte by byte. Links are
// followed, and no directory is entered twice for one path. Paths stay in the order given. A file
// that is no text is left out of directories, and an Error where it is named. So is a path that is
// missing, cannot be read, or names a directory without text. Files of rows without known fields
// are left out of directories, too, and so is text beside rows.
TextFiles find_text_files(std::span<const std::string> paths, const TextFileOptions& options = {});

// "2 hidden, 1 binary"; "" for nothing.
std::string to_text(const LeftOut& left_out);

// UTF-8 of programs for Windows begins with a mark.
std::string_view without_mark(std::string_view text);

}  // namespace fsdp
