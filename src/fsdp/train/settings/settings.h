// The table of everything that can be set about a training run: one row is a flag of `fsdp train`,
// a key of its config file, a line of --print-config and a line of the run's first table.
#pragma once

#include <functional>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "fsdp/train/log/run_records.h"
#include "fsdp/train/settings/train_options.h"

namespace fsdp::train {

// The form of a value in a config file.
enum class SettingKind { kNumber, kText, kFlag, kList };

struct Setting {
  const char* group;  // "model", "data", ...
  const char* name;   // as a flag without its dashes: "grad-comm"
  const char* type;   // for help: "N", "DTYPE"
  const char* help;
  SettingKind kind;
  // The values as text: several for lists, else one; a flag is "true" or "false".
  std::function<std::vector<std::string>(const TrainOptions&)> read;
  // Throws a UsageError that begins with `option`, the reader's name for the value: "--steps".
  std::function<void(TrainOptions&, const std::string& option, const std::vector<std::string>&)>
      write;

  // "grad_comm": its key in a config file.
  std::string key() const;
};

// In the order in which they are shown.
std::span<const Setting> settings();

// The values of a command line, by the setting's name.
using GivenValues = std::map<std::string, std::vector<std::string>>;

// Sets the given values; their names must be known.
void apply_given(TrainOptions& options, const GivenValues& given);

// Sets the values of a config file: one object, keys as above. UsageError that begins with
// `source`; the error about an unknown key names the nearest one.
void apply_config(TrainOptions& options, std::string_view text, const std::string& source);

// A config file that sets every field to its value in `options`.
std::string config_text(const TrainOptions& options);

// Every setting as a flag and its value, to compare: {"--lr", "0.004"}.
std::vector<std::pair<std::string, std::string>> setting_facts(const TrainOptions& options);

// The rows shown at the start of a run: resolved values, with a mark where the given value is not
// the default.
std::vector<SettingRow> shown_settings(const TrainOptions& given, const TrainOptions& resolved);

}  // namespace fsdp::train
