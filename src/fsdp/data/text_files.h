// Which files are the text that paths name, in an order that depends on their names alone.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace fsdp {

// How much of directories is no text.
struct LeftOut {
  int64_t num_hidden = 0;  // files and directories whose names begin with a dot
  int64_t num_binary = 0;  // files with a zero byte in their first 8 KiB
  int64_t num_empty = 0;
  int64_t num_other = 0;  // devices, pipes, links to nothing

  int64_t total() const { return num_hidden + num_binary + num_empty + num_other; }
  LeftOut& operator+=(const LeftOut& more);
  bool operator==(const LeftOut&) const = default;
};

struct TextFiles {
  std::vector<std::string> paths;  // one document each
  int64_t bytes = 0;               // of all of them
  LeftOut left_out = {};
};

// A file that is named is taken whatever it holds; a directory stands for the files in and below
// it, sorted by their paths, byte by byte. Links are followed, and no directory is entered twice
// for one path. Paths stay in the order given. Error where a path is missing, cannot be read, or
// names a directory without text.
TextFiles find_text_files(std::span<const std::string> paths);

// "2 hidden, 1 binary"; "" for nothing.
std::string to_text(const LeftOut& left_out);

}  // namespace fsdp
