#include "fsdp/cli/option_values.h"

#include <string>
#include <vector>

#include "fsdp/base/error.h"
#include "fsdp/base/text.h"

namespace fsdp::cli {

namespace {

std::vector<std::string> long_names(const CLI::App& app) {
  std::vector<std::string> names;
  for (const CLI::Option* option : app.get_options())
    for (const std::string& name : option->get_lnames()) names.push_back("--" + name);
  return names;
}

}  // namespace

void refuse_leftovers(const CLI::App& app) {
  for (const CLI::App* sub : app.get_subcommands()) refuse_leftovers(*sub);
  const std::vector<std::string> leftovers = app.remaining();
  if (leftovers.empty()) return;
  const std::string& word = leftovers.front();
  const bool is_option = word.starts_with('-');
  const bool at_top = app.get_parent() == nullptr;
  std::vector<std::string> candidates = long_names(app);
  if (!is_option) {
    candidates.clear();
    for (const CLI::App* sub : app.get_subcommands([](const CLI::App*) { return true; }))
      candidates.push_back(sub->get_name());
  }
  // "--opt=value" is compared without its value.
  const std::string near = nearest(word.substr(0, word.find('=')), candidates);
  const std::string kind = is_option ? "option" : at_top ? "subcommand" : "argument";
  const std::string place = at_top ? "fsdp" : "fsdp " + app.get_name();
  const std::string help = concat("ee ", place, " --help");
  throw UsageError(
      concat(kind, " '", word, "' is not known to ", place, "; ",
             near.empty() ? "s" + help : concat("did you mean '", near, "'? S", help)));
}

}  // namespace fsdp::cli
