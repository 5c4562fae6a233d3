// The table of everything that can be set about a training run: one row is a flag of `fsdp train`,
// a key of its config file, a line of --print-config and a line of what is shown at the start.
#pragma once

#include <functional>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "fsdp/train/run_facts.h"
#include "fsdp/train/train_options.h"

namespace fsdp::train {

// What a value looks like in a config file.
enum class SettingKind { kNumber, kText, kFlag, kList };

struct Setting {
  const char* group;  // "model", "data", ...
  const char* name;   // as a flag without its dashes: "grad-comm"
  const char* type;   // for help: "N", "DTYPE"
  const char* help;
  SettingKind kind;
  // The values as text: one, but for lists; a flag is "true" or "false".
  std::function<std::vector<std::string>(const TrainOptions&)> read;
  // UsageError that begins with `option`, which names the value for its reader: "--steps".
  std::function<void(TrainOptions&, const std::string& option, const std::vector<std::string>&)>
      write;

  // "grad_comm": its key in a config file.
  std::string key() const;
};

// In the order in which they are shown.
std::span<const Setting> settings();

// What a command line says: values by the setting's name.
using GivenValues = std::map<std::string, std::vector<std::string>>;

// Sets what was given; the names must be known.
void apply_given(TrainOptions& options, const GivenValues& given);

// The same from the text of a config file: one object, keys as above. UsageError that begins with
// `source`; an unknown key is answered with the nearest.
void apply_config(TrainOptions& options, std::string_view text, const std::string& source);

// A config file that sets every field to what it is here.
std::string config_text(const TrainOptions& options);

// Every setting as a flag and its value, to compare: {"--lr", "0.004"}.
std::vector<std::pair<std::string, std::string>> setting_facts(const TrainOptions& options);

// What is shown at the start of a run: values as they were resolved, marked where what was given is
// not the default.
std::vector<SettingRow> shown_settings(const TrainOptions& given, const TrainOptions& resolved);

}  // namespace fsdp::train
