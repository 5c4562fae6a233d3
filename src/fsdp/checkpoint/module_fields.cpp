#include "fsdp/checkpoint/module_fields.h"

#include <algorithm>
#include <charconv>

#include "fsdp/base/error.h"
#include "fsdp/base/glob.h"
#include "fsdp/base/integer.h"
#include "fsdp/base/text.h"

namespace fsdp {

namespace {

bool is_digit(char c) { return '0' <= c && c <= '9'; }

bool is_field_name(std::string_view text) {
  const auto is_letter = [](char c) {
    return ('a' <= c && c <= 'z') || ('A' <= c && c <= 'Z') || c == '_';
  };
  return !text.empty() && is_letter(text[0]) &&
         std::all_of(text.begin(), text.end(), [&](char c) { return is_letter(c) || is_digit(c); });
}

std::string_view without_spaces_around(std::string_view text) {
  const size_t begin = text.find_first_not_of(' ');
  if (begin == std::string_view::npos) return {};
  return text.substr(begin, text.find_last_not_of(' ') - begin + 1);
}

int64_t num_letters(std::string_view pattern) {
  return std::count_if(pattern.begin(), pattern.end(), [](char c) { return c != '*' && c != '?'; });
}

// A pattern of modules describes what lies inside them, too; "layers.1" not what is in "layers.12".
bool owns(const std::string& modules, std::string_view tensor) {
  return matches_glob(modules, tensor) || matches_glob(modules + ".*", tensor);
}

[[noreturn]] void refuse_unknown(const ModuleFields& fields, std::string_view tensor,
                                 const std::string& field) {
  std::vector<std::string> known;
  for (const FieldsOfModules& entry : fields)
    for (const auto& [name, value] : entry.values)
      if (owns(entry.modules, tensor)) known.push_back(name);
  const std::string near = nearest(field, known);
  throw Error(concat("the field '", field, "' of the module of tensor '", tensor, "' is unknown; ",
                     near.empty() ? "" : concat("there is '", near, "'; "),
                     "add it to the fields of a pattern that describes the module"));
}

}  // namespace

std::optional<int64_t> field_of(const ModuleFields& fields, std::string_view tensor,
                                const std::string& field) {
  std::optional<int64_t> best;
  int64_t best_letters = -1;
  for (const FieldsOfModules& entry : fields) {
    const auto found = entry.values.find(field);
    const int64_t letters = num_letters(entry.modules);
    if (found == entry.values.end() || letters < best_letters || !owns(entry.modules, tensor))
      continue;
    best = found->second;
    best_letters = letters;
  }
  return best;
}

FieldSum::FieldSum(std::string_view text) {
  for (size_t begin = 0; begin <= text.size();) {
    const size_t end = std::min(text.find('+', begin), text.size());
    const std::string_view term = without_spaces_around(text.substr(begin, end - begin));
    int64_t number = 0;
    const auto [stop, problem] = std::from_chars(term.data(), term.data() + term.size(), number);
    if (is_field_name(term)) {
      fields_.emplace_back(term);
    } else if (!term.empty() && is_digit(term[0]) && problem == std::errc() &&
               stop == term.data() + term.size()) {
      constant_ = checked_add(constant_, number);
    } else {
      throw UsageError(concat("'", text, "' is not a sum of whole numbers and fields, because of '",
                              term, "'; write it like 24 or kv_lora_rank + 8"));
    }
    begin = end + 1;
  }
}

int64_t FieldSum::value(const ModuleFields& fields, std::string_view tensor) const {
  int64_t sum = constant_;
  for (const std::string& field : fields_) {
    const std::optional<int64_t> value = field_of(fields, tensor, field);
    if (!value) refuse_unknown(fields, tensor, field);
    sum = checked_add(sum, *value);
  }
  return sum;
}

}  // namespace fsdp
