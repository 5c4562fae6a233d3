// A directory that appears complete or not at all.
#pragma once

#include <cstdint>
#include <string>

#include "fsdp/base/durable_file.h"

namespace fsdp {

// Files are written to path(), a hidden directory beside the target; publish() renames it to the
// target. The destructor removes a directory that was not published, and the next object for the
// same target removes one that a crash left. A second writer of the same target, in any process, is
// refused.
class StagedDirectory {
 public:
  enum class Existing : uint8_t {
    kRefuse,
    // Replaces a target that is empty, a checkpoint, or holds safetensors files; refuses any other,
    // which the user cannot have meant.
    kReplace,
  };

  // Throws an Error if the target exists and must not be replaced.
  StagedDirectory(const std::string& target, Existing existing);
  ~StagedDirectory();
  StagedDirectory(const StagedDirectory&) = delete;
  StagedDirectory& operator=(const StagedDirectory&) = delete;

  const std::string& path() const { return path_; }

  // Files must be on the disk already (FileWriter::commit). There is an instant between the old
  // directory and the new one; a crash then leaves the old one as .NAME.replaced.
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
