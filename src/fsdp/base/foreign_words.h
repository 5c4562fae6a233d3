// Words that people bring from other programs, and the hints that errors give them.
#pragma once

#include <span>
#include <string>
#include <string_view>

namespace fsdp {

struct ForeignWord {
  std::string_view words;       // with spaces between; in small letters, with - between their parts
  std::string_view name;        // ours: an option without its dashes, or a value
  std::string_view value = {};  // that the option takes for it
  std::string_view note = {};   // where the two do not mean quite the same
  bool is_needless = false;     // nothing is to be said: `note` is always so
};

// The table. A word may have several rows: the first whose name is a candidate counts.
std::span<const ForeignWord> foreign_words();

// The candidate that another program's word is just another name of; "" if there is none.
std::string same_value(std::string_view word, std::span<const std::string> candidates);

// "did you mean '--lr'? ", to go on with, for a word that is none of `candidates` (options, keys of
// a config file, or values): the candidate that means what another program calls so, else the
// nearest one; "" if there is none.
std::string meant_text(std::string_view word, std::span<const std::string> candidates);

}  // namespace fsdp
