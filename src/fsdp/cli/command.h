// The subcommands of `fsdp` and their common parts. Each subcommand's file declares its options and
// the function that runs after they are read.
#pragma once

#include <CLI/CLI.hpp>
#include <chrono>
#include <cstdint>
#include <functional>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <thread>

#include "fsdp/base/error.h"
#include "fsdp/base/option_values.h"
#include "fsdp/comm/comm_error.h"
#include "fsdp/comm/launch.h"

namespace fsdp::cli {

// The whole command: runs the subcommand that the arguments name and returns the process's exit
// code.
int run(int argc, char** argv);

// Help within 100 columns.
class HelpFormatter final : public CLI::Formatter {
 public:
  std::string make_option(const CLI::Option* option, bool is_positional) const override;
  std::string make_subcommand(const CLI::App* sub) const override;
  std::string make_footer(const CLI::App* app) const override;
};

struct Command {
  CLI::App* app = nullptr;
  // Called after the options of a given subcommand are read. Prints results to standard output and
  // throws errors (UsageError: exit code 2, anything else: 1).
  std::function<void()> run;
};

// Thrown by a command that has printed its message, to end with this exit code.
struct ExitCode {
  int code = 0;
};

// For commands that show a run themselves: leaves out the engine's messages except warnings, unless
// FSDP_LOG asks for them. Call it before the first message.
void log_warnings_only();

// More ranks than any machine has; a larger number is a typing error.
inline constexpr int64_t kMaxRanks = 1'000'000;

// To standard output. Replaces bytes that are not UTF-8 (a file's name need not be).
void print_json(const nlohmann::ordered_json& value);

Command add_train(CLI::App& parent);
Command add_generate(CLI::App& parent);
Command add_eval(CLI::App& parent);
Command add_plan(CLI::App& parent);
Command add_inspect(CLI::App& parent);
Command add_convert(CLI::App& parent);
Command add_patch(CLI::App& parent);
Command add_data(CLI::App& parent);
Command add_report(CLI::App& parent);
Command add_info(CLI::App& parent);
Command add_completion(CLI::App& parent);

// --- what the command line holds beside known options --------------------------------------------

// Throws a UsageError for the first argument that nothing has taken, with the nearest option or
// subcommand.
void refuse_leftovers(const CLI::App& app);

// Throws a UsageError for a repeated flag, whose values the parser would add up.
void refuse_repeated_flags(const CLI::App& app);

// Rewords the parser's error about an option with no value or with several.
std::string mismatch_text(const std::string& what);

// --- one process speaks for all ------------------------------------------------------------------

// The time that a launcher needs to end a failed job. Open MPI takes 1 to 2.3 s from the end of the
// first process to SIGKILL for the others.
constexpr std::chrono::seconds kMomentForLauncher{4};

// Every process of a job finds the same mistake, but a person should read it once. So rank 0 throws
// at once, and the others wait for the launcher to end them; after that time they throw a mistake
// that rank 0 did not find.
template <typename Action>
auto report_on_rank0(const Launch& launch, const Action& action) {
  try {
    return action();
  } catch (const Error&) {
    if (launch.rank > 0) std::this_thread::sleep_for(kMomentForLauncher);
    throw;
  }
}

// Reports an error of one process that the others learn of by a CommError: the others wait, so
// that only the failed process speaks. A TimeoutError is thrown at once, because processes that
// waited for the failed one have it.
template <typename Action>
void report_on_failed_rank(const Action& action) {
  try {
    action();
  } catch (const TimeoutError&) {
    throw;
  } catch (const CommError&) {
    std::this_thread::sleep_for(kMomentForLauncher);
    throw;
  }
}

}  // namespace fsdp::cli
