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
  TempDir() : path_((std::filesystem::temp_directory_path() / "fsdp_test_XXXXXX").string()) {
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
  std::string path_;
};

}  // namespace fsdp::testing
