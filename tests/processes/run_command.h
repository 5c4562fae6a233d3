// Runs `fsdp` the way a user does, seeing exit code and both outputs.
#pragma once

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

namespace fsdp::test {

struct CommandResult {
  int exit_code = -1;  // minus its number for a signal
  std::string out;
  std::string err;
};

// `arguments` as typed after "fsdp", with a shell's quotes; `environment` as typed after `env`
// ("RANK=3", "-u RANK"). The command runs in a copy of this process, which has libtorch loaded
// already: a start of the program takes half a second.
CommandResult run_fsdp(const std::string& arguments, const std::string& environment = "");

// Runs words of a command line from another directory, with an environment of its own,
// "NAME=value" of each variable.
CommandResult run_fsdp_in(const std::string& directory, const std::vector<std::string>& words,
                          const std::vector<std::string>& environment);

// Starts the built program through a shell, which also redirects.
CommandResult start_fsdp(const std::string& arguments);

// The command failed: the last thing it said is a sentence with `says` in it.
inline void expect_error(const CommandResult& result, int exit_code, const std::string& says) {
  EXPECT_EQ(result.exit_code, exit_code) << result.err;
  EXPECT_THAT(result.err,
              ::testing::AllOf(::testing::HasSubstr("fsdp: "), ::testing::HasSubstr(says),
                               ::testing::ContainsRegex("[^.?][.?]\n$")));
}

// expect_error(), and the command said nothing else.
inline void expect_only_error(const CommandResult& result, int exit_code, const std::string& says) {
  expect_error(result, exit_code, says);
  EXPECT_THAT(result.err, ::testing::StartsWith("fsdp: "));
  EXPECT_EQ(std::count(result.err.begin(), result.err.end(), '\n'), 1) << result.err;
  EXPECT_EQ(result.out, "");
}

}  // namespace fsdp::test
