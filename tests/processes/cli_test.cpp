// The command `fsdp`: help, exit codes, one-sentence errors, JSON.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <sstream>
#include <string>

#include "processes/run_command.h"

namespace fsdp::cli_test {
namespace {

using test::CommandResult;
using test::run_fsdp;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::StartsWith;

// Bad use: nothing on standard output, exit code 2, one sentence on one line.
void expect_bad_use(const CommandResult& result, const std::string& says) {
  test::expect_only_error(result, 2, says);
}

TEST(Command, ShowsItsVersion) {
  const CommandResult result = test::start_fsdp("--version");
  EXPECT_EQ(result.exit_code, 0);
  EXPECT_EQ(result.out, "fsdp " FSDP_EXPECTED_VERSION "\n");
}

TEST(Command, HelpListsEverySubcommandWithAnExample) {
  const CommandResult result = run_fsdp("--help");
  EXPECT_EQ(result.exit_code, 0);
  EXPECT_EQ(result.err, "");
  EXPECT_THAT(result.out,
              AllOf(HasSubstr("  plan "), HasSubstr("  inspect "), HasSubstr("  convert "),
                    HasSubstr("  report "), HasSubstr("  info "), HasSubstr("Examples:")));
  EXPECT_THAT(run_fsdp("info --help").out, AllOf(HasSubstr("--json"), HasSubstr("Example:")));
  EXPECT_EQ(run_fsdp("").out, result.out);
}

TEST(Command, HelpOfTrainIsThatOfTheFirstHourUnlessAllIsAskedFor) {
  const std::string first = run_fsdp("train --help").out;
  const std::string all = run_fsdp("train --help-all").out;
  EXPECT_THAT(first, AllOf(HasSubstr("--checkpoint-dir"), HasSubstr("--help-all"),
                           Not(HasSubstr("--granularity"))));
  EXPECT_THAT(all, AllOf(HasSubstr("--checkpoint-dir"), HasSubstr("--granularity")));
  EXPECT_EQ(run_fsdp("train --help-all").exit_code, 0);
  for (const std::string& help :
       {first, all, run_fsdp("--help").out, run_fsdp("plan --help").out}) {
    std::istringstream lines(help);
    for (std::string line; std::getline(lines, line);) EXPECT_LE(line.size(), 100U) << line;
  }
}

TEST(Command, SuggestsTheNearestWord) {
  expect_bad_use(run_fsdp("inof"), "subcommand 'inof' is not known to fsdp; did you mean 'info'?");
  expect_bad_use(run_fsdp("paln"), "did you mean 'plan'?");
  expect_bad_use(run_fsdp("--versoin"), "did you mean '--version'?");
  expect_bad_use(run_fsdp("info --jsno"),
                 "option '--jsno' is not known to fsdp info; did you mean '--json'?");
  expect_bad_use(run_fsdp("info surplus"),
                 "argument 'surplus' is not known to fsdp info; see fsdp");
}

TEST(Command, FailsWhenItsOutputCannotBeWritten) {
  const CommandResult result = test::start_fsdp("info >/dev/full");
  EXPECT_EQ(result.exit_code, 1);
  EXPECT_THAT(result.err, StartsWith("fsdp: standard output"));
}

TEST(Info, ShowsBuildLibtorchBackendsDevicesAndRanks) {
  const CommandResult table = run_fsdp("info");
  EXPECT_EQ(table.exit_code, 0);
  for (const char* row :
       {"fsdp ", "build ", "libtorch ", "math ", "backends ", "devices ", "ranks "})
    EXPECT_THAT(table.out, HasSubstr(row));
  const auto info = nlohmann::json::parse(run_fsdp("info --json").out);
  EXPECT_EQ(info.at("version"), FSDP_EXPECTED_VERSION);
  EXPECT_THAT(info.at("libtorch").at("version").get<std::string>(), StartsWith("2."));
  EXPECT_THAT(info.at("libtorch").at("place").get<std::string>(), StartsWith("/"));
  EXPECT_THAT(info.at("math").get<std::string>(), HasSubstr("vectors of "));
  EXPECT_EQ(info.at("backends").at(0), "threads");
  EXPECT_THAT(info.at("devices").at(0).get<std::string>(), StartsWith("cpu: "));
  EXPECT_FALSE(info.at("build_type").get<std::string>().empty());
  EXPECT_FALSE(info.at("compiler").get<std::string>().empty());
}

TEST(Info, SeesTheRanksOfALauncher) {
  const auto info =
      nlohmann::json::parse(run_fsdp("info --json",
                                     "OMPI_COMM_WORLD_RANK=3 OMPI_COMM_WORLD_SIZE=8 "
                                     "OMPI_COMM_WORLD_LOCAL_RANK=1 OMPI_COMM_WORLD_LOCAL_SIZE=2")
                                .out);
  EXPECT_EQ(info.at("ranks").at("rank"), 3);
  EXPECT_EQ(info.at("ranks").at("size"), 8);
  EXPECT_EQ(info.at("ranks").at("launcher"), "mpirun");
}

TEST(Info, ShowsABrokenEnvironmentInsteadOfFailing) {
  const CommandResult result = run_fsdp("info", "-u WORLD_SIZE RANK=3");
  EXPECT_EQ(result.exit_code, 0);
  EXPECT_THAT(result.out, HasSubstr("RANK without WORLD_SIZE"));
}

}  // namespace
}  // namespace fsdp::cli_test
