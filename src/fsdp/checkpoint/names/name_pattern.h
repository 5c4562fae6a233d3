// Patterns over tensor names that capture parts of them, templates that make names of these parts,
// and the numbers of modules that names and sections may refer to.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "fsdp/checkpoint/names/name_rules.h"

namespace fsdp {

// --- numbers of modules --------------------------------------------------------------------------

// A field of the module that owns a tensor; nullopt if no pattern states it.
std::optional<int64_t> field_of(const ModuleFields& fields, std::string_view tensor,
                                const std::string& field);

// A sum of whole numbers and fields: "24", "kv_lora_rank + qk_pos_emb_head_dim".
class FieldSum {
 public:
  // Throws a UsageError if the text is not such a sum.
  explicit FieldSum(std::string_view text);

  // Throws an Error if the tensor's module does not state one of the fields.
  int64_t value(const ModuleFields& fields, std::string_view tensor) const;

 private:
  int64_t constant_ = 0;
  std::vector<std::string> fields_;
};

// --- patterns ------------------------------------------------------------------------------------

struct NameMatch {
  std::string before;              // the modules around it, with their last dot; "" for none
  std::vector<std::string> found;  // [0]: the rest of the name; [1] ...: the text at each place
};

// Matches the end of a name, from the beginning of a module: "mlp.weight" matches
// "decoder.mlp.weight", too, but not "my_mlp.weight".
//
//   *      any text, also none and also over dots; as little as possible
//   ?      one character
//   #      a whole number, as many digits as there are
//   (a|b)  one of the texts, the first that fits; one may be empty: "weight(|_w|_v)"
class NamePattern {
 public:
  // Throws a UsageError that names the fault.
  explicit NamePattern(std::string_view text);

  std::optional<NameMatch> match(std::string_view name) const;

  // The number of places that capture text.
  size_t num_places() const { return num_places_; }

 private:
  struct Part {
    enum class Kind { kText, kStar, kOneCharacter, kNumber, kChoice };
    Kind kind = Kind::kText;
    std::vector<std::string> texts;  // one for kText, the alternatives of kChoice
  };

  struct Search;

  // Where the text of part `index` may end if it begins at `begin`, the preferred end first.
  std::vector<size_t> ends(size_t index, std::string_view name, size_t begin) const;
  bool match_from(size_t index, size_t begin, Search& search) const;

  std::vector<Part> parts_;
  size_t num_places_ = 0;
};

// A name with places to fill: "$0_w" is the matched text and "_w", $1 to $9 are the captured texts,
// and "{$2 + expert_offset}" is the second one as a number plus a sum of fields.
class NameTemplate {
 public:
  // Throws a UsageError, also for places that the pattern does not have.
  NameTemplate(std::string_view text, const NamePattern& pattern);

  // The fields are those of the module of tensor `owner`.
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
