// The command `fsdp`: reads the options, runs one subcommand, turns an error into one sentence and
// an exit code.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <iostream>
#include <string>
#include <utility>
#include <vector>

#include "fsdp/base/check.h"
#include "fsdp/base/log.h"
#include "fsdp/base/text.h"
#include "fsdp/base/version.h"
#include "fsdp/cli/command.h"

namespace {

constexpr int kFine = 0;
constexpr int kFailure = 1;
constexpr int kBadUse = 2;

constexpr const char* kDescription =
    "Fully sharded data-parallel training on libtorch: plans, runs and inspects it.";
constexpr const char* kCommandFooter =
    "Examples:\n"
    "  fsdp train --data docs --ranks 2                   a small language model of some text\n"
    "  fsdp generate --checkpoint runs/a --prompt 'The '  what it has learnt\n"
    "  fsdp report runs/a runs/b                          curves of runs on one page\n"
    "  fsdp plan --model llama3-8b --ranks 8 --compare    memory and traffic of every strategy\n"
    "  fsdp inspect runs/7b --verify                      what a checkpoint holds, and whether it "
    "is whole\n"
    "  fsdp convert runs/7b exported --to hf              a checkpoint for HuggingFace's packages\n"
    "  fsdp patch apply exported patches                  what training changed, to weights in "
    "files\n"
    "  fsdp data pack books --output books.bin            text as a token file to train on\n"
    "  fsdp info                                          this build, its libtorch and devices\n"
    "fsdp SUBCOMMAND --help explains the options of one.";

// In CLI11's order, from the last word to the first. "--name=" stands for an empty value, for which
// CLI11 would take the next word.
std::vector<std::string> words_of(int argc, char** argv) {
  std::vector<std::string> words;
  for (int i = 1; i < argc; ++i) {
    const std::string word = argv[i];
    const bool is_empty_value = word.starts_with("--") && word.find('=') == word.size() - 1;
    words.push_back(is_empty_value ? word.substr(0, word.size() - 1) : word);
    if (is_empty_value) words.emplace_back();
  }
  std::reverse(words.begin(), words.end());
  return words;
}

void parse(CLI::App& app, std::vector<std::string> words) {
  try {
    app.parse(std::move(words));
  } catch (const CLI::Success&) {  // --help, --version
    throw;
  } catch (const CLI::ArgumentMismatch& error) {
    throw fsdp::UsageError(fsdp::cli::mismatch_text(error.what()));
  } catch (const CLI::ConversionError& error) {  // of a flag: we read all other values ourselves
    throw fsdp::UsageError(fsdp::concat(error.what(), "; a flag takes no value"));
  } catch (const CLI::ParseError& error) {
    throw fsdp::UsageError(error.what());
  }
  fsdp::cli::refuse_leftovers(app);
  fsdp::cli::refuse_repeated_flags(app);
}

// Leaves errors about the environment to the subcommand.
fsdp::Launch launch_if_known() try { return fsdp::read_launch(); } catch (const fsdp::Error&) {
  return {};
}

int run(int argc, char** argv) {
  fsdp::check_log_level();
  CLI::App app(kDescription, "fsdp");
  app.footer(kCommandFooter);
  app.set_version_flag("--version", "fsdp " FSDP_VERSION);
  const std::vector<fsdp::cli::Command> commands = {
      fsdp::cli::add_train(app),   fsdp::cli::add_generate(app),  fsdp::cli::add_eval(app),
      fsdp::cli::add_data(app),    fsdp::cli::add_plan(app),      fsdp::cli::add_inspect(app),
      fsdp::cli::add_convert(app), fsdp::cli::add_patch(app),     fsdp::cli::add_report(app),
      fsdp::cli::add_info(app),    fsdp::cli::add_completion(app)};
  app.require_subcommand(0, 1);  // none is handled below, a second one is a surplus argument
  // Collects unknown arguments, so that the error can name the nearest option.
  app.allow_extras();
  for (const fsdp::cli::Command& command : commands) command.app->allow_extras();
  try {
    fsdp::cli::let_the_first_speak(launch_if_known(), [&] { parse(app, words_of(argc, argv)); });
  } catch (const CLI::Success& request) {
    return app.exit(request);
  }
  for (const fsdp::cli::Command& command : commands) {
    if (!command.app->parsed()) continue;
    command.run();
    return kFine;
  }
  throw fsdp::UsageError("no subcommand was given; see fsdp --help");
}

// One sentence on one line; a question ("did you mean ...?") ends as it is.
void print_error(const std::string& words) {
  std::fprintf(stderr, "fsdp: %s%s\n", words.c_str(), words.ends_with('?') ? "" : ".");
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
    print_error(error.what());
    return kBadUse;
  } catch (const std::exception& error) {
    // libtorch's messages continue with a stack trace, which helps nobody here.
    const std::string what = error.what();
    print_error(what.substr(0, what.find('\n')));
    return kFailure;
  }
}
