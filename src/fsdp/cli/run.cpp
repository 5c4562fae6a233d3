// Reads the options, runs one subcommand, turns an error into one sentence and an exit code.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <iostream>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "fsdp/base/check.h"
#include "fsdp/base/log.h"
#include "fsdp/base/text.h"
#include "fsdp/base/version.h"
#include "fsdp/cli/command.h"

namespace fsdp::cli {

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
    throw UsageError(mismatch_text(error.what()));
  } catch (const CLI::ConversionError& error) {  // of a flag: we read all other values ourselves
    throw UsageError(concat(error.what(), "; a flag takes no value"));
  } catch (const CLI::ParseError& error) {
    throw UsageError(error.what());
  }
  refuse_leftovers(app);
  refuse_repeated_flags(app);
}

// Leaves errors about the environment to the subcommand.
Launch launch_if_known() try { return read_launch(); } catch (const Error&) {
  return {};
}

int run_subcommand(int argc, char** argv) {
  check_log_level();
  CLI::App app(kDescription, "fsdp");
  app.footer(kCommandFooter);
  app.formatter(std::make_shared<HelpFormatter>());
  app.set_version_flag("--version", "fsdp " FSDP_VERSION);
  const std::vector<Command> commands = {add_train(app),   add_generate(app),  add_eval(app),
                                         add_data(app),    add_plan(app),      add_inspect(app),
                                         add_convert(app), add_patch(app),     add_report(app),
                                         add_info(app),    add_completion(app)};
  app.require_subcommand(0, 1);  // none is handled below, a second one is a surplus argument
  // Collects unknown arguments, so that the error can name the nearest option.
  app.allow_extras();
  for (const Command& command : commands) command.app->allow_extras();
  try {
    report_on_rank0(launch_if_known(), [&] { parse(app, words_of(argc, argv)); });
  } catch (const CLI::Success& request) {
    return app.exit(request);
  }
  for (const Command& command : commands) {
    if (!command.app->parsed()) continue;
    command.run();
    return kFine;
  }
  std::cout << app.help();
  return kFine;
}

// One sentence on one line; a question ("did you mean ...?") ends as it is.
void print_error(const std::string& words) {
  std::fprintf(stderr, "fsdp: %s%s\n", words.c_str(), words.ends_with('?') ? "" : ".");
}

}  // namespace

void log_warnings_only() { ::setenv("FSDP_LOG", "warning", /*overwrite=*/0); }

int run(int argc, char** argv) {
  try {
    const int code = run_subcommand(argc, argv);
    std::cout.flush();
    if (!std::cout) throw Error("standard output cannot be written; check its place");
    return code;
  } catch (const ExitCode& exit) {
    return exit.code;
  } catch (const UsageError& error) {
    print_error(error.what());
    return kBadUse;
  } catch (const std::exception& error) {
    // libtorch's messages continue with a stack trace, which helps nobody here.
    const std::string what = error.what();
    print_error(what.substr(0, what.find('\n')));
    return kFailure;
  }
}

}  // namespace fsdp::cli
