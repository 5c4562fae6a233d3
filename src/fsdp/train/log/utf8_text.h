// Turns text from outside (a model's output, names of hosts) into text that every reader takes.
#pragma once

#include <string>
#include <string_view>

namespace fsdp::train {

// Valid UTF-8 without control characters other than tabs and line breaks, so that no text moves a
// terminal's cursor. Everything else becomes U+FFFD, the replacement character.
std::string clean_utf8(std::string_view text);

// The same with HTML's special characters as entities: for text and for quoted attributes.
std::string html_text(std::string_view text);

}  // namespace fsdp::train
