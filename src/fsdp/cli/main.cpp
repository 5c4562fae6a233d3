// The command `fsdp`: reads the options, runs one subcommand, turns what went wrong into one
// sentence and an exit code.
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <iostream>
#include <string>
#include <vector>

#include "fsdp/base/error.h"
#include "fsdp/base/text.h"
#include "fsdp/base/version.h"
#include "fsdp/cli/command.h"
#include "fsdp/cli/option_values.h"

namespace {

constexpr int kFine = 0;
constexpr int kFailure = 1;
constexpr int kBadUse = 2;

constexpr const char* kDescription =
    "Fully sharded data-parallel training on libtorch: plans, runs and inspects it.";
constexpr const char* kFooter =
    "Examples:\n"
    "  fsdp train --data docs --ranks 2                   a small language model of some text\n"
    "  fsdp generate --checkpoint runs/a --prompt 'The '  what it has learnt\n"
    "  fsdp plan --model llama3-8b --ranks 8 --compare    memory and traffic of every strategy\n"
    "  fsdp inspect runs/7b --verify                      what a checkpoint holds, and whether it "
    "is whole\n"
    "  fsdp convert runs/7b exported --to hf              a checkpoint for HuggingFace's packages\n"
    "  fsdp data pack books --output books.bin            text as a token file to train on\n"
    "  fsdp info                                          this build, its libtorch and devices\n"
    "fsdp SUBCOMMAND --help explains the options of one.";

int run(int argc, char** argv) {
  CLI::App app(kDescription, "fsdp");
  app.footer(kFooter);
  app.set_version_flag("--version", "fsdp " FSDP_VERSION);
  const std::vector<fsdp::cli::Command> commands = {
      fsdp::cli::add_train(app),   fsdp::cli::add_generate(app), fsdp::cli::add_eval(app),
      fsdp::cli::add_data(app),    fsdp::cli::add_plan(app),     fsdp::cli::add_inspect(app),
      fsdp::cli::add_convert(app), fsdp::cli::add_info(app)};
  app.require_subcommand(0, 1);  // none is answered below, a second one is a surplus argument
  // Unknown arguments are collected, not refused, so that they can be answered with the nearest.
  app.allow_extras();
  for (const fsdp::cli::Command& command : commands) command.app->allow_extras();
  try {
    app.parse(argc, argv);
  } catch (const CLI::Success& request) {  // --help, --version
    return app.exit(request);
  } catch (const CLI::ArgumentMismatch& error) {
    throw fsdp::UsageError(fsdp::cli::mismatch_text(error.what()));
  } catch (
      const CLI::ConversionError& error) {  // of a flag: all else is text that we read ourselves
    throw fsdp::UsageError(fsdp::concat(error.what(), "; a flag takes no value"));
  } catch (const CLI::ParseError& error) {
    throw fsdp::UsageError(error.what());
  }
  fsdp::cli::refuse_leftovers(app);
  for (const fsdp::cli::Command& command : commands) {
    if (!command.app->parsed()) continue;
    command.run();
    return kFine;
  }
  throw fsdp::UsageError("no subcommand was given; see fsdp --help");
}

}  // namespace

void fsdp::cli::log_warnings_only() { ::setenv("FSDP_LOG", "warning", /*overwrite=*/0); }

int main(int argc, char** argv) {
  try {
    const int code = run(argc, argv);
    std::cout.flush();
    if (!std::cout) throw fsdp::Error("standard output cannot be written; check its place");
    return code;
  } catch (const fsdp::cli::ExitCode& exit) {
    return exit.code;
  } catch (const fsdp::UsageError& error) {
    std::fprintf(stderr, "fsdp: %s.\n", error.what());
    return kBadUse;
  } catch (const std::exception& error) {
    // Exceptions of libtorch go on with a stack trace, which helps nobody here.
    const std::string what = error.what();
    std::fprintf(stderr, "fsdp: %s.\n", what.substr(0, what.find('\n')).c_str());
    return kFailure;
  }
}
