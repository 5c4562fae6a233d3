// Runs the built `fsdp` the way a user does: through a shell, seeing exit code and both outputs.
#pragma once

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <sstream>
#include <stdexcept>
#include <string>

namespace fsdp::test {

struct CommandResult {
  int exit_code = -1;
  std::string out;
  std::string err;
};

// `arguments` as typed after "fsdp"; `environment` as typed before it ("RANK=3").
inline CommandResult run_fsdp(const std::string& arguments, const std::string& environment = "") {
  std::string err_path = "/tmp/fsdp_cli_test_XXXXXX";
  const int descriptor = ::mkstemp(err_path.data());
  if (descriptor < 0) throw std::runtime_error("no temporary file");
  ::close(descriptor);
  const std::string line =
      "env " + environment + " '" FSDP_BINARY "' " + arguments + " 2>" + err_path;
  CommandResult result;
  FILE* pipe = ::popen(line.c_str(), "r");
  if (pipe == nullptr) throw std::runtime_error("cannot run: " + line);
  std::array<char, 4096> buffer{};
  size_t count = 0;
  while ((count = std::fread(buffer.data(), 1, buffer.size(), pipe)) > 0)
    result.out.append(buffer.data(), count);
  const int status = ::pclose(pipe);
  result.exit_code = WIFEXITED(status) ? WEXITSTATUS(status) : -1;
  std::ostringstream err;
  err << std::ifstream(err_path).rdbuf();
  result.err = err.str();
  ::unlink(err_path.c_str());
  return result;
}

// The command failed: the last thing it said is a sentence with `says` in it.
inline void expect_error(const CommandResult& result, int exit_code, const std::string& says) {
  EXPECT_EQ(result.exit_code, exit_code) << result.err;
  EXPECT_THAT(result.err,
              ::testing::AllOf(::testing::HasSubstr("fsdp: "), ::testing::HasSubstr(says),
                               ::testing::ContainsRegex("[^.?][.?]\n$")));
}

// The same, and it said nothing else.
inline void expect_only_error(const CommandResult& result, int exit_code, const std::string& says) {
  expect_error(result, exit_code, says);
  EXPECT_THAT(result.err, ::testing::StartsWith("fsdp: "));
  EXPECT_EQ(std::count(result.err.begin(), result.err.end(), '\n'), 1) << result.err;
  EXPECT_EQ(result.out, "");
}

}  // namespace fsdp::test
