// Everything that can be set about a training run: a setting is a flag of `fsdp train`, a key of
// its config file, a line of --print-config and a line of the run's first table.
#pragma once

#include <map>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "fsdp/base/option_fields.h"
#include "fsdp/train/log/run_records.h"
#include "fsdp/train/settings/train_options.h"

namespace fsdp {

// --- words of choices ----------------------------------------------------------------------------

inline ChoiceNames choice_names(LoadOptions::Extra) { return {"refuse", "allow"}; }
inline ChoiceNames choice_names(PatchNames) { return {"hf", "vllm"}; }
inline ChoiceNames choice_names(RateDecay) { return names_of(all_rate_decays()); }
inline ChoiceNames choice_names(RateSchedule) { return names_of(all_rate_schedules()); }
inline ChoiceNames choice_names(Recompute) { return {"none", "block"}; }
inline ChoiceNames choice_names(ExpertExchange) { return {"auto", "exact", "padded"}; }
inline ChoiceNames choice_names(SaveMode) { return {"blocking", "background"}; }
inline ChoiceNames choice_names(WindowDocuments) { return {"joined", "separate", "packed"}; }

namespace train {

inline ChoiceNames choice_names(DeviceChoice) { return {"auto", "cpu", "cuda"}; }
inline ChoiceNames choice_names(OptimizerChoice) { return {"adamw", "sgd", "muon"}; }

// --- settings ------------------------------------------------------------------------------------

// The form of a value in a config file.
enum class SettingKind { kNumber, kText, kFlag, kList };

struct Setting {
  std::string group;  // "model", "data", ...
  std::string name;   // as a flag without its dashes: "grad-comm"
  std::string type;   // for help: "N", "DTYPE"
  const char* help;
  SettingKind kind;
  std::vector<std::string> values;  // several for lists, else one; a flag is "true" or "false"

  // "grad_comm": its key in a config file.
  std::string key() const;
};

// All settings with their values in `options`, in the order in which they are shown.
std::vector<Setting> settings(TrainOptions options = {});

// The values of a command line, by the setting's name.
using GivenValues = std::map<std::string, std::vector<std::string>>;

// Sets the given values; their names must be known. UsageError that begins with the flag.
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

}  // namespace train
}  // namespace fsdp
