#include "fsdp/cli/command.h"

#include <iostream>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "fsdp/base/check.h"
#include "fsdp/base/foreign_words.h"
#include "fsdp/base/text.h"

namespace fsdp::cli {

namespace {

std::vector<std::string> long_names(const CLI::App& app) {
  std::vector<std::string> names;
  for (const CLI::Option* option : app.get_options())
    for (const std::string& name : option->get_lnames()) names.push_back("--" + name);
  return names;
}

// "fsdp data pack"
std::string full_name(const CLI::App& app) {
  const CLI::App* const parent = app.get_parent();
  return parent == nullptr ? app.get_name() : concat(full_name(*parent), " ", app.get_name());
}

}  // namespace

void print_json(const nlohmann::ordered_json& value) {
  std::cout << value.dump(2, ' ', false, nlohmann::json::error_handler_t::replace) << "\n";
}

void refuse_leftovers(const CLI::App& app) {
  for (const CLI::App* sub : app.get_subcommands()) refuse_leftovers(*sub);
  const std::vector<std::string> leftovers = app.remaining();
  if (leftovers.empty()) return;
  const std::string& word = leftovers.front();
  const bool is_option = word.starts_with('-');
  const auto subcommands = app.get_subcommands([](const CLI::App*) { return true; });
  std::vector<std::string> candidates = long_names(app);
  if (!is_option) {
    candidates.clear();
    for (const CLI::App* sub : subcommands) candidates.push_back(sub->get_name());
  }
  // "--opt=value" is compared without its value.
  const std::string meant = meant_text(word.substr(0, word.find('=')), candidates);
  const std::string kind = is_option ? "option" : subcommands.empty() ? "argument" : "subcommand";
  const std::string place = full_name(app);
  throw UsageError(concat(kind, " '", word, "' is not known to ", place, "; ",
                          meant.empty() ? "s" : concat(meant, "S"), "ee ", place, " --help"));
}

void refuse_repeated_flags(const CLI::App& app) {
  for (const CLI::App* sub : app.get_subcommands()) refuse_repeated_flags(*sub);
  for (const CLI::Option* option : app.get_options())
    if (option->get_items_expected_max() == 0 && option->count() > 1)
      throw UsageError(
          concat("--", option->get_lnames().front(), " was given more than once; give it once"));
}

std::string mismatch_text(const std::string& what) {
  const std::string option = what.substr(0, what.find(':'));
  if (what.find(" missing") != std::string::npos)
    return concat(option, " has no value; give one, or leave the option out");
  if (what.find(" received ") != std::string::npos)
    return concat(option, " was given more than once; give it once, with one value");
  return concat(what, "; give the option once, with one value");
}

}  // namespace fsdp::cli
