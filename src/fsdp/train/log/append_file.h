// A file that grows by whole records while a run goes on; a full disk does not stop the run.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "fsdp/base/durable_file.h"

namespace fsdp::train {

// Writes every record at once, so that a person who follows the file sees it. For one thread at a
// time.
class AppendFile {
 public:
  // Opens the file, or makes it and the directories above. Throws an Error if that fails, now
  // rather than after a night. `option` is the flag that chooses another path: "--log".
  AppendFile(std::string path, const std::string& option);

  // Writes the whole record or nothing: training is worth more than its log. A failure is said
  // once, and again after a success in between.
  void append(std::string_view record);

  const std::string& path() const { return path_; }

 private:
  std::string path_;
  FileHandle file_;
  int64_t bytes_ = 0;  // whole records; negative for pipes and terminals, which cannot be cut
  bool is_failing_ = false;
};

}  // namespace fsdp::train
