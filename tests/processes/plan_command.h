// `fsdp plan` for tests: its JSON, and what it refuses.
#pragma once

#include <gtest/gtest.h>
#include <unistd.h>

#include <fstream>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "processes/run_command.h"

namespace fsdp::test {

// A file for the time of one test.
class TextFile {
 public:
  TextFile(const std::string& name, const std::string& text)
      : path_(::testing::TempDir() + "fsdp_" + std::to_string(::getpid()) + "_" + name) {
    std::ofstream(path_) << text;
  }
  ~TextFile() { ::unlink(path_.c_str()); }
  TextFile(const TextFile&) = delete;
  TextFile& operator=(const TextFile&) = delete;
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

inline nlohmann::json plan_json(const std::string& arguments) {
  const CommandResult result = run_fsdp("plan " + arguments + " --json");
  EXPECT_EQ(result.exit_code, 0) << result.err;
  EXPECT_EQ(result.err, "");
  return nlohmann::json::parse(result.out);
}

struct BadUse {
  const char* arguments;
  const char* says;
};

// Each row's arguments after the common ones.
inline void expect_refused(const std::string& common, const std::vector<BadUse>& table) {
  for (const BadUse& bad : table) {
    SCOPED_TRACE(bad.arguments);
    expect_only_error(run_fsdp("plan " + common + " " + bad.arguments), 2, bad.says);
  }
}

}  // namespace fsdp::test
