// Reads and writes the fields of TrainOptions as text, by their kind, for the rows of the table of
// settings.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include "fsdp/base/check.h"
#include "fsdp/base/option_values.h"
#include "fsdp/base/text.h"
#include "fsdp/train/settings/settings.h"

namespace fsdp::train {

// The two functions of a row.
struct SettingValue {
  SettingKind kind;
  std::function<std::vector<std::string>(const TrainOptions&)> read;
  std::function<void(TrainOptions&, const std::string&, const std::vector<std::string>&)> write;
};

// The shortest text that reads back as the same number.
std::string number_text(double value);

// From functions that take and give one text.
template <typename Read, typename Write>
SettingValue one_value(SettingKind kind, Read read, Write write) {
  return {
      kind, [read](const TrainOptions& o) { return std::vector<std::string>{read(o)}; },
      [write](TrainOptions& o, const std::string& option, const std::vector<std::string>& values) {
        if (values.size() != 1)
          throw UsageError(concat(option, " is given ", values.size(),
                                  " values; give the option once, with one value"));
        write(o, option, values.front());
      }};
}

SettingValue text_value(std::string TrainOptions::*field);
SettingValue list_value(std::vector<std::string> TrainOptions::*field);
SettingValue flag_value(bool TrainOptions::*field);
SettingValue number_value(double TrainOptions::*field, double minimum, double maximum);
SettingValue bytes_value(int64_t TrainOptions::*field);  // 0: "none"

// `access` finds the field: a pointer to a member, or a function of the options.
template <typename Access>
SettingValue whole_value(Access access, int64_t minimum, int64_t maximum) {
  return one_value(
      SettingKind::kNumber,
      [access](const TrainOptions& o) { return std::to_string(std::invoke(access, o)); },
      [access, minimum, maximum](TrainOptions& o, const std::string& option,
                                 const std::string& value) {
        using Field = std::remove_cvref_t<decltype(std::invoke(access, o))>;
        std::invoke(access, o) =
            static_cast<Field>(parse_whole_number(option, value, minimum, maximum));
      });
}

// A value of the field's kind, or "auto".
SettingValue whole_or_auto(std::optional<int64_t> TrainOptions::*field, int64_t minimum,
                           int64_t maximum);
SettingValue number_or_auto(std::optional<double> TrainOptions::*field, double minimum,
                            double maximum);

// An enumeration whose values are 0, 1, ... in the order of their names.
template <typename Choice>
SettingValue choice_value(Choice TrainOptions::*field, std::vector<std::string> names) {
  return one_value(
      SettingKind::kText,
      [field, names](const TrainOptions& o) { return names[static_cast<size_t>(o.*field)]; },
      [field, names](TrainOptions& o, const std::string& option, const std::string& value) {
        o.*field = static_cast<Choice>(parse_choice(option, value, names));
      });
}

// A dtype, or `absent` for none.
template <typename Access>
SettingValue dtype_value(Access access, std::string absent = "none") {
  return one_value(
      SettingKind::kText,
      [access, absent](const TrainOptions& o) {
        const std::optional<DType> dtype = std::invoke(access, o);
        return dtype ? std::string(name_of(*dtype)) : absent;
      },
      [access, absent](TrainOptions& o, const std::string& option, const std::string& value) {
        std::invoke(access, o) =
            value == absent ? std::nullopt : parse_dtype_or(option, value, absent);
      });
}

// All rows, in the order in which they are shown (setting_rows.cpp).
std::vector<Setting> make_setting_rows();

}  // namespace fsdp::train
