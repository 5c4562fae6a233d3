// A directory for one test, removed at its end.
#pragma once

#include <stdlib.h>

#include <cstdlib>
#include <string>

#include "fsdp/base/check.h"
#include "fsdp/base/durable_file.h"

namespace fsdp::testing {

class TempDir {
 public:
  // kMemory, if there is such a place, for tests that write many files: nothing waits for a disk.
  enum class On { kDisk, kMemory };

  explicit TempDir(On on = On::kDisk) : path_(parent(on) + "/fsdp_test_XXXXXX") {
    FSDP_CHECK(::mkdtemp(path_.data()) != nullptr, path_, ": cannot create the directory");
  }
  TempDir(const TempDir&) = delete;
  TempDir& operator=(const TempDir&) = delete;
  ~TempDir() {
    try {
      remove_tree(path_);
    } catch (const Error&) {  // a part of it may have been removed
    }
  }

  const std::string& path() const { return path_; }

  // The path of `name` in it.
  std::string operator/(const std::string& name) const { return path_ + "/" + name; }

 private:
  static std::string parent(On on) {
    if (on == On::kMemory && is_directory("/dev/shm")) return "/dev/shm";
    const char* const given = std::getenv("TMPDIR");
    return given != nullptr && *given != '\0' ? given : "/tmp";
  }

  std::string path_;
};

}  // namespace fsdp::testing
