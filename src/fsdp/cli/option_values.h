// What the command line holds beside known options.
#pragma once

#include <CLI/CLI.hpp>
#include <string>

#include "fsdp/base/option_values.h"

namespace fsdp::cli {

// Throws UsageError for the first argument that nothing has taken, with the nearest option or
// subcommand.
void refuse_leftovers(const CLI::App& app);

// Throws UsageError for a flag that was given twice, of which the parser would add up what it says.
void refuse_repeated_flags(const CLI::App& app);

// The parser's words for an option without its value, or with several, as people say it.
std::string mismatch_text(const std::string& what);

}  // namespace fsdp::cli
