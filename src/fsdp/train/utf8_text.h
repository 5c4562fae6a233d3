// Text from outside (what a model wrote, names of hosts) as text that every reader takes.
#pragma once

#include <string>
#include <string_view>

namespace fsdp::train {

// Valid UTF-8 without control characters other than tabs and line breaks: what is neither becomes
// U+FFFD, the mark of what cannot be shown. So nothing moves a terminal's cursor.
std::string clean_utf8(std::string_view text);

// The same, with the characters that mean something to HTML as entities. For text and for values of
// attributes in quotes.
std::string html_text(std::string_view text);

}  // namespace fsdp::train
