// Patterns over tensor names that keep what they found, and the names that are made from it.
#pragma once

#include <cstddef>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "fsdp/checkpoint/module_fields.h"

namespace fsdp {

// What a pattern found in a name.
struct NameMatch {
  std::string before;              // the modules around it, with their last dot; "" for none
  std::vector<std::string> found;  // [0]: the rest of the name; [1] ...: what each place stands for
};

// Describes the end of a name, from a module or from its begin on: "mlp.weight" is for
// "decoder.mlp.weight", too, but not for "my_mlp.weight".
//
//   *      any text, also none and also over dots; as little as possible
//   ?      one character
//   #      a whole number, as many digits as there are
//   (a|b)  one of the texts, the first that fits; one may be empty: "weight(|_w|_v)"
class NamePattern {
 public:
  // UsageError that says what is wrong with it.
  explicit NamePattern(std::string_view text);

  std::optional<NameMatch> match(std::string_view name) const;

  // How many places it has that stand for something.
  size_t num_places() const { return num_places_; }

 private:
  struct Part {
    enum class Kind { kText, kStar, kOneCharacter, kNumber, kChoice };
    Kind kind = Kind::kText;
    std::vector<std::string> texts;  // one for kText, the alternatives of kChoice
  };

  struct Search;

  // Where the text of part `index` may end when it begins at `begin`, the preferred end first.
  std::vector<size_t> ends(size_t index, std::string_view name, size_t begin) const;
  bool match_from(size_t index, size_t begin, Search& search) const;

  std::vector<Part> parts_;
  size_t num_places_ = 0;
};

// A name with places to fill: "$0_w" is what the pattern described and "_w", $1 to $9 are what its
// places stand for, and "{$2 + expert_offset}" is the number of the second one plus a sum of
// fields.
class NameTemplate {
 public:
  // UsageError, also for places that the pattern does not have.
  NameTemplate(std::string_view text, const NamePattern& pattern);

  // `owner` is the tensor whose module's fields are meant.
  std::string fill(const NameMatch& match, const ModuleFields& fields,
                   std::string_view owner) const;

 private:
  // Text, or a place, or a place plus a sum.
  struct Part {
    std::string text;
    std::optional<size_t> place = std::nullopt;
    std::optional<FieldSum> sum = std::nullopt;
  };

  std::vector<Part> parts_;
};

}  // namespace fsdp
