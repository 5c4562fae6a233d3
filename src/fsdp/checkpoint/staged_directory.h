// A directory that appears complete or not at all.
#pragma once

#include <cstdint>
#include <string>

#include "fsdp/base/durable_file.h"

namespace fsdp {

// Files are written to path(), a hidden directory beside the target; publish() makes that the
// target. What is not published is removed at the end of this object's life, and what a crash left
// is removed by the next one for the same target. Only one at a time writes a target, whatever
// process it is in: the second one is refused.
class StagedDirectory {
 public:
  enum class Existing : uint8_t {
    kRefuse,
    // In place of the target if that is empty, a checkpoint or holds safetensors files; whatever
    // else there is was not meant.
    kReplace,
  };

  // Error if the target is there and must not be replaced.
  StagedDirectory(const std::string& target, Existing existing);
  ~StagedDirectory();
  StagedDirectory(const StagedDirectory&) = delete;
  StagedDirectory& operator=(const StagedDirectory&) = delete;

  const std::string& path() const { return path_; }

  // Files in it are on the disk already (FileWriter::finish). Between the old directory and the new
  // one there is an instant with neither; a crash then leaves the old one as .NAME.replaced.
  void publish();

 private:
  void check_target() const;
  void lock();
  std::string beside(const char* suffix) const;

  std::string target_;
  Existing existing_;
  std::string path_;
  FileHandle lock_;  // of the directory at path_
};

}  // namespace fsdp
