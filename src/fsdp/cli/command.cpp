#include "fsdp/cli/command.h"

#include <iostream>
#include <nlohmann/json.hpp>
#include <sstream>
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

constexpr size_t kHelpColumns = 100;
constexpr size_t kNameColumns = 30;

// `text` in lines of the help, each begun with so many blanks; lines that fit stay as they are.
std::string wrapped(const std::string& text, size_t indent) {
  const std::string blanks(indent, ' ');
  std::vector<std::string> lines;
  std::istringstream given(text);
  for (std::string line; std::getline(given, line);) {
    while (indent + line.size() > kHelpColumns) {
      const size_t end = line.rfind(' ', kHelpColumns - indent);
      if (end == std::string::npos) break;
      lines.push_back(blanks + line.substr(0, end));
      line.erase(0, end + 1);
    }
    lines.push_back(blanks + line);
  }
  return join(lines, "\n");
}

std::string two_columns(const std::string& name, const std::string& text) {
  const std::string right = wrapped(text, kNameColumns);
  if (name.size() >= kNameColumns) return concat(name, "\n", right, "\n");
  return concat(name, right.size() < name.size() ? "" : right.substr(name.size()), "\n");
}

}  // namespace

std::string HelpFormatter::make_option(const CLI::Option* option, bool is_positional) const {
  return two_columns(
      concat("  ", make_option_name(option, is_positional), make_option_opts(option)),
      make_option_desc(option));
}

std::string HelpFormatter::make_subcommand(const CLI::App* sub) const {
  return two_columns(concat("  ", sub->get_name()), sub->get_description());
}

std::string HelpFormatter::make_footer(const CLI::App* app) const {
  return concat(wrapped(app->get_footer(), 0), "\n");
}

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
