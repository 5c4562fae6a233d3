// Fields of options as data: one list per struct, which everything walks that reads, writes, shows
// or compares its fields.
//
// A list is a function visit_fields(options, visit), which calls visit(field, value, flag) for
// every field: for the flags and the config file of `fsdp train`, for Python's keywords, and for
// the facts that ranks compare. The words of an enumeration are choice_names(), beside these lists.
#pragma once

#include <cstdint>
#include <limits>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include "fsdp/base/option_values.h"

namespace fsdp {

struct OptionField {
  const char* name = "";          // in C++, for messages: "precision.main_params"
  const char* keyword = nullptr;  // in Python; nullptr: it has none
  bool may_differ = false;        // between ranks
};

// How a field is set by `fsdp train`.
struct OptionFlag {
  std::string_view group = {};  // of the help: "sharding"
  const char* name = "";        // without its dashes: "grad-comm"
  // For the help: "N"; kBytesType and kFlagType decide the form of a value.
  std::string_view type = {};
  const char* help = "";
  // For numbers, both included.
  double minimum = 0;
  double maximum = 0;
  const char* absent = "none";  // the word for nullopt, and for 0 bytes
};

struct NoFlag {};
inline constexpr NoFlag kNoFlag;

inline constexpr std::string_view kBytesType = "BYTES";
// Also for a choice of two, whose first is false.
inline constexpr std::string_view kFlagType = "BOOL";

using ChoiceNames = std::vector<std::string>;

template <typename Value>
ChoiceNames names_of(std::span<const Value> values) {
  ChoiceNames names;
  for (const Value value : values) names.emplace_back(name_of(value));
  return names;
}

// The text of a value as people type it, and the value of a text. Errors begin with `option`, the
// reader's name for it: "--steps". Structs have to_text(value) and read_text(option, text, value).
template <typename Value>
struct OptionText {
  static ChoiceNames names(const OptionFlag& flag) {
    if constexpr (std::is_same_v<Value, bool>)
      return {"false", "true"};
    else
      return flag.type == kFlagType ? OptionText<bool>::names(flag) : choice_names(Value{});
  }

  static std::string write(const Value& value, const OptionFlag& flag) {
    if constexpr (std::is_same_v<Value, bool> || std::is_enum_v<Value>) {
      const ChoiceNames known = names(flag);
      const auto index = static_cast<size_t>(value);
      return index < known.size() ? known[index] : std::to_string(index);
    } else if constexpr (std::is_integral_v<Value>) {
      return value == 0 && flag.type == kBytesType ? flag.absent : std::to_string(value);
    } else if constexpr (std::is_floating_point_v<Value>) {
      return number_text(value);
    } else if constexpr (std::is_same_v<Value, std::string>) {
      return value;
    } else {
      return to_text(value);
    }
  }

  static void read(const std::string& option, const std::string& text, Value& value,
                   const OptionFlag& flag) {
    if constexpr (std::is_same_v<Value, bool> || std::is_enum_v<Value>) {
      value = static_cast<Value>(parse_choice(option, text, names(flag)));
    } else if constexpr (std::is_integral_v<Value>) {
      constexpr int64_t kLargest = std::numeric_limits<int64_t>::max();
      const auto whole = [](double limit) {
        return limit < 0x1p63 ? static_cast<int64_t>(limit) : kLargest;
      };
      if (flag.type == kBytesType)  // a minimum above 0: it may not be absent
        value = text == flag.absent && flag.minimum == 0 ? 0 : parse_bytes(option, text);
      else
        value = static_cast<Value>(
            parse_whole_number(option, text, whole(flag.minimum), whole(flag.maximum)));
    } else if constexpr (std::is_floating_point_v<Value>) {
      value = parse_number(option, text, flag.minimum, flag.maximum);
    } else if constexpr (std::is_same_v<Value, std::string>) {
      value = text;
    } else {
      read_text(option, text, value);
    }
  }
};

template <>
struct OptionText<DType> {
  static std::string write(DType value, const OptionFlag&) { return std::string(name_of(value)); }
  static void read(const std::string& option, const std::string& text, DType& value,
                   const OptionFlag& flag) {
    value = *parse_dtype_or(option, text, flag.absent);
  }
};

template <typename Value>
struct OptionText<std::optional<Value>> {
  static std::string write(const std::optional<Value>& value, const OptionFlag& flag) {
    return value ? OptionText<Value>::write(*value, flag) : flag.absent;
  }
  static void read(const std::string& option, const std::string& text, std::optional<Value>& value,
                   const OptionFlag& flag) {
    if (text == flag.absent) {
      value = std::nullopt;
    } else if constexpr (requires { choice_names(Value{}); }) {
      ChoiceNames names = {flag.absent};
      for (std::string& name : choice_names(Value{})) names.push_back(std::move(name));
      value = static_cast<Value>(parse_choice(option, text, names) - 1);
    } else {
      OptionText<Value>::read(option, text, value.emplace(), flag);
    }
  }
};

template <typename Value>
inline constexpr bool kIsList = false;
template <typename Value>
inline constexpr bool kIsList<std::vector<Value>> = true;

// The texts of a field: several for a list, else one.
template <typename Value>
std::vector<std::string> option_texts(const Value& value, const OptionFlag& flag = {}) {
  if constexpr (kIsList<Value>) {
    std::vector<std::string> texts;
    for (const auto& each : value)
      texts.push_back(OptionText<typename Value::value_type>::write(each, flag));
    return texts;
  } else {
    return {OptionText<Value>::write(value, flag)};
  }
}

template <typename Value>
void read_option(const std::string& option, const std::vector<std::string>& texts, Value& value,
                 const OptionFlag& flag) {
  if constexpr (kIsList<Value>) {
    value.clear();
    for (const std::string& text : texts) {
      if (text.empty()) refuse_option(option, text, "it must not be empty");
      OptionText<typename Value::value_type>::read(option, text, value.emplace_back(), flag);
    }
  } else {
    OptionText<Value>::read(option, the_only_text(option, texts), value, flag);
  }
}

}  // namespace fsdp
