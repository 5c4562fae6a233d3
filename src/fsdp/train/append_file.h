// A file that grows by whole records while a run goes on, and that no full disk stops a run with.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "fsdp/base/durable_file.h"

namespace fsdp::train {

// Records are written at once, so that whoever follows the file sees them. For one thread at a
// time.
class AppendFile {
 public:
  // Opens the file, or makes it and the directories above. An Error if that fails: better now than
  // after a night. `option` is how a person chooses another path: "--log".
  AppendFile(std::string path, const std::string& option);

  // A record that cannot be written as a whole is lost as a whole: training is worth more than its
  // log. Said once, and again after it has worked in between.
  void append(std::string_view record);

  const std::string& path() const { return path_; }

 private:
  std::string path_;
  FileHandle file_;
  int64_t bytes_ = 0;  // whole records; negative for pipes and terminals, which cannot be cut
  bool is_failing_ = false;
};

}  // namespace fsdp::train
