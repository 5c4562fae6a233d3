#include "fsdp/train/settings/settings.h"

#include <algorithm>
#include <nlohmann/json.hpp>

#include "fsdp/base/check.h"
#include "fsdp/base/foreign_words.h"
#include "fsdp/base/json_fields.h"
#include "fsdp/base/text.h"
#include "fsdp/train/settings/setting_values.h"

namespace fsdp::train {

namespace {

const Setting* find(std::string_view name) {
  for (const Setting& setting : settings())
    if (setting.name == name) return &setting;
  return nullptr;
}

// A JSON value as it would be typed on a command line.
std::string typed(const nlohmann::json& value, const std::string& option) {
  if (value.is_string()) return value.get<std::string>();
  if (value.is_number() || value.is_boolean()) return value.dump();
  throw UsageError(concat(option, " is ", value.dump(), "; it must be a number, a text or a flag"));
}

std::vector<std::string> values_of(const nlohmann::json& value, const Setting& setting,
                                   const std::string& option) {
  if (!value.is_array()) return {typed(value, option)};
  if (setting.kind != SettingKind::kList)
    throw UsageError(concat(option, " is ", value.dump(), "; it must be a single value"));
  std::vector<std::string> values;
  for (const nlohmann::json& each : value) values.push_back(typed(each, option));
  return values;
}

nlohmann::ordered_json to_json(const Setting& setting, const std::vector<std::string>& values) {
  switch (setting.kind) {
    case SettingKind::kList:
      return values;
    case SettingKind::kText:
      return values.front();
    case SettingKind::kFlag:
    case SettingKind::kNumber:
      break;
  }
  return nlohmann::ordered_json::parse(values.front());
}

}  // namespace

std::string Setting::key() const {
  std::string result = name;
  std::replace(result.begin(), result.end(), '-', '_');
  return result;
}

std::span<const Setting> settings() {
  static const std::vector<Setting> kSettings = make_setting_rows();
  return kSettings;
}

void apply_given(TrainOptions& options, const GivenValues& given) {
  // In the table's order, so that a setting that changes several fields comes before those that
  // change one of them.
  for (const Setting& setting : settings()) {
    const auto found = given.find(setting.name);
    if (found != given.end()) setting.write(options, concat("--", setting.name), found->second);
  }
  for (const auto& [name, values] : given) FSDP_ASSERT(find(name) != nullptr, name);
}

void apply_config(TrainOptions& options, std::string_view text, const std::string& source) {
  const nlohmann::json document = parse_json(text, source);
  if (!document.is_object())
    throw UsageError(concat(source, ": a config file is one JSON object, e.g. {\"steps\": 100}"));
  std::vector<std::string> keys;
  for (const Setting& setting : settings()) keys.push_back(setting.key());
  for (const auto& [key, value] : document.items()) {
    if (std::find(keys.begin(), keys.end(), key) != keys.end()) continue;
    throw UsageError(concat(source, ": '", key, "' is no setting; ", meant_text(key, keys),
                            "fsdp train --print-config lists them all"));
  }
  for (const Setting& setting : settings()) {
    const auto found = document.find(setting.key());
    if (found == document.end()) continue;
    const std::string option = concat(source, ": ", setting.key());
    setting.write(options, option, values_of(*found, setting, option));
  }
}

std::vector<std::pair<std::string, std::string>> setting_facts(const TrainOptions& options) {
  std::vector<std::pair<std::string, std::string>> facts;
  for (const Setting& setting : settings())
    facts.emplace_back(concat("--", setting.name), join(setting.read(options), " "));
  return facts;
}

std::string config_text(const TrainOptions& options) {
  nlohmann::ordered_json document;
  for (const Setting& setting : settings())
    document[setting.key()] = to_json(setting, setting.read(options));
  return document.dump(2, ' ', false, nlohmann::json::error_handler_t::replace) + "\n";
}

std::vector<SettingRow> shown_settings(const TrainOptions& given, const TrainOptions& resolved) {
  const TrainOptions defaults;
  std::vector<SettingRow> shown;
  for (const Setting& setting : settings())
    shown.push_back({.group = setting.group,
                     .name = setting.name,
                     .value = join(setting.read(resolved), " "),
                     .is_changed = setting.read(given) != setting.read(defaults),
                     .help = setting.help});
  return shown;
}

}  // namespace fsdp::train
