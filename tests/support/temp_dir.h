// A directory of its own for a test, gone at its end.
#pragma once

#include <stdlib.h>

#include <filesystem>
#include <string>
#include <system_error>

#include "fsdp/base/error.h"

namespace fsdp::testing {

class TempDir {
 public:
  // kMemory, where there is such a place, for tests that write many files: nothing waits for a
  // disk.
  enum class On { kDisk, kMemory };

  explicit TempDir(On on = On::kDisk) : path_((parent(on) / "fsdp_test_XXXXXX").string()) {
    FSDP_CHECK(::mkdtemp(path_.data()) != nullptr, path_, ": cannot create the directory");
  }
  TempDir(const TempDir&) = delete;
  TempDir& operator=(const TempDir&) = delete;
  ~TempDir() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }

  const std::string& path() const { return path_; }

  // The path of `name` in it.
  std::string operator/(const std::string& name) const { return path_ + "/" + name; }

 private:
  static std::filesystem::path parent(On on) {
    const std::filesystem::path memory = "/dev/shm";
    std::error_code ignored;
    if (on == On::kMemory && std::filesystem::is_directory(memory, ignored)) return memory;
    return std::filesystem::temp_directory_path();
  }

  std::string path_;
};

}  // namespace fsdp::testing
