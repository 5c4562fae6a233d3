#include "fsdp/train/settings/setting_values.h"

#include <charconv>

#include "fsdp/base/check.h"

namespace fsdp::train {

namespace {

const std::string kAuto = "auto";

}  // namespace

std::string number_text(double value) {
  char buffer[32];
  const auto [end, error] = std::to_chars(buffer, buffer + sizeof(buffer), value);
  FSDP_ASSERT(error == std::errc{});
  return std::string(buffer, end);
}

SettingValue text_value(std::string TrainOptions::*field) {
  return one_value(
      SettingKind::kText, [field](const TrainOptions& o) { return o.*field; },
      [field](TrainOptions& o, const std::string&, const std::string& value) { o.*field = value; });
}

SettingValue list_value(std::vector<std::string> TrainOptions::*field) {
  return {
      SettingKind::kList, [field](const TrainOptions& o) { return o.*field; },
      [field](TrainOptions& o, const std::string& option, const std::vector<std::string>& values) {
        for (const std::string& value : values)
          if (value.empty()) refuse_option(option, value, "it must not be empty");
        o.*field = values;
      }};
}

SettingValue flag_value(bool TrainOptions::*field) {
  return one_value(
      SettingKind::kFlag,
      [field](const TrainOptions& o) { return std::string(o.*field ? "true" : "false"); },
      [field](TrainOptions& o, const std::string& option, const std::string& value) {
        const std::string names[] = {"false", "true"};
        o.*field = parse_choice(option, value, names) == 1;
      });
}

SettingValue number_value(double TrainOptions::*field, double minimum, double maximum) {
  return one_value(
      SettingKind::kNumber, [field](const TrainOptions& o) { return number_text(o.*field); },
      [=](TrainOptions& o, const std::string& option, const std::string& value) {
        o.*field = parse_number(option, value, minimum, maximum);
      });
}

SettingValue whole_or_auto(std::optional<int64_t> TrainOptions::*field, int64_t minimum,
                           int64_t maximum) {
  return one_value(
      SettingKind::kText,
      [field](const TrainOptions& o) { return o.*field ? std::to_string(*(o.*field)) : kAuto; },
      [=](TrainOptions& o, const std::string& option, const std::string& value) {
        o.*field = value == kAuto
                       ? std::nullopt
                       : std::optional(parse_whole_number(option, value, minimum, maximum));
      });
}

SettingValue number_or_auto(std::optional<double> TrainOptions::*field, double minimum,
                            double maximum) {
  return one_value(
      SettingKind::kText,
      [field](const TrainOptions& o) { return o.*field ? number_text(*(o.*field)) : kAuto; },
      [=](TrainOptions& o, const std::string& option, const std::string& value) {
        o.*field = value == kAuto ? std::nullopt
                                  : std::optional(parse_number(option, value, minimum, maximum));
      });
}

SettingValue bytes_value(int64_t TrainOptions::*field) {
  return one_value(
      SettingKind::kText,
      [field](const TrainOptions& o) {
        return o.*field == 0 ? std::string("none") : std::to_string(o.*field);
      },
      [field](TrainOptions& o, const std::string& option, const std::string& value) {
        o.*field = value == "none" ? 0 : parse_bytes(option, value);
      });
}

}  // namespace fsdp::train
