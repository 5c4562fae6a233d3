// `fsdp completion`: a script with which a shell completes the command's subcommands and options.
#include <iostream>
#include <memory>
#include <string>
#include <vector>

#include "fsdp/base/text.h"
#include "fsdp/cli/command.h"

namespace fsdp::cli {

namespace {

// One (sub)command: how it is typed after "fsdp", and what may come next.
struct CompletedCommand {
  std::string path;  // "", " train", " data pack"
  std::vector<std::string> words;
};

void collect(const CLI::App& app, const std::string& path,
             std::vector<CompletedCommand>& commands) {
  CompletedCommand command{path, {}};
  const auto subcommands = app.get_subcommands([](const CLI::App*) { return true; });
  for (const CLI::App* sub : subcommands) command.words.push_back(sub->get_name());
  for (const CLI::Option* option : app.get_options())
    for (const std::string& name : option->get_lnames()) command.words.push_back("--" + name);
  commands.push_back(std::move(command));
  for (const CLI::App* sub : subcommands)
    collect(*sub, concat(path, " ", sub->get_name()), commands);
}

// Names of commands and options have letters and dashes alone, so single quotes hold any of them.
// Where no option begins like the word, the shell completes the names of files.
void print_bash(std::ostream& out, const std::vector<CompletedCommand>& commands) {
  std::vector<std::string> paths;
  for (const CompletedCommand& command : commands)
    if (!command.path.empty()) paths.push_back(concat("'", command.path, "'"));
  out << "_fsdp() {\n"
         "  local path='' words='' at\n"
         "  for ((at = 1; at < COMP_CWORD; at++)); do\n"
         "    case \"$path ${COMP_WORDS[at]}\" in\n"
         "      "
      << join(paths, " | ")
      << ") path+=\" ${COMP_WORDS[at]}\" ;;\n"
         "    esac\n"
         "  done\n"
         "  case \"$path\" in\n";
  for (const CompletedCommand& command : commands)
    out << "    '" << command.path << "') words='" << join(command.words, " ") << "' ;;\n";
  out << "  esac\n"
         "  COMPREPLY=($(compgen -W \"$words\" -- \"${COMP_WORDS[COMP_CWORD]}\"))\n"
         "}\n"
         "complete -o default -F _fsdp fsdp\n";
}

void run_completion(const CLI::App& fsdp, const std::string& shell) {
  const std::vector<std::string> shells = {"bash", "zsh"};
  const size_t choice = parse_choice("SHELL", shell, shells);
  std::vector<CompletedCommand> commands;
  collect(fsdp, "", commands);
  // zsh runs scripts for bash itself.
  if (shells[choice] == "zsh")
    std::cout << "autoload -U +X compinit && compinit\n"
                 "autoload -U +X bashcompinit && bashcompinit\n";
  print_bash(std::cout, commands);
}

}  // namespace

Command add_completion(CLI::App& parent) {
  CLI::App* app =
      parent.add_subcommand("completion", "Print a script that completes fsdp in a shell");
  app->footer(
      "Examples:\n"
      "  eval \"$(fsdp completion bash)\"                                in this shell\n"
      "  fsdp completion bash > ~/.local/share/bash-completion/completions/fsdp   in all later "
      "ones");
  const auto shell = std::make_shared<std::string>();
  app->add_option("SHELL", *shell, "bash or zsh")->type_name("bash|zsh");
  return {app, [&parent, shell] { run_completion(parent, *shell); }};
}

}  // namespace fsdp::cli
