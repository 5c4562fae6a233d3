// The subcommands of `fsdp`: each file declares its options and what runs once they are read.
#pragma once

#include <CLI/CLI.hpp>
#include <functional>

namespace fsdp::cli {

struct Command {
  CLI::App* app = nullptr;
  // Called when the subcommand was given and its options were read. Results go to standard output;
  // what cannot be done is thrown (UsageError: exit code 2, anything else: 1).
  std::function<void()> run;
};

// Thrown by a command that has said what there was to say, and wants this exit code.
struct ExitCode {
  int code = 0;
};

// For commands that show a run themselves: what the engine says of itself beside warnings is left
// out, unless FSDP_LOG asks for it. Before the first message.
void log_warnings_only();

Command add_train(CLI::App& parent);
Command add_generate(CLI::App& parent);
Command add_eval(CLI::App& parent);
Command add_plan(CLI::App& parent);
Command add_inspect(CLI::App& parent);
Command add_convert(CLI::App& parent);
Command add_data(CLI::App& parent);
Command add_info(CLI::App& parent);

}  // namespace fsdp::cli
