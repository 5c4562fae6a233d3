// Settings as flags of subcommands: those of a run, with a config file whose values they replace,
// and those with which a trained model is loaded.
#pragma once

#include <CLI/CLI.hpp>
#include <map>
#include <string>
#include <vector>

#include "fsdp/train/model/trained_model.h"
#include "fsdp/train/settings/settings.h"

namespace fsdp::cli {

class SettingFlags {
 public:
  // --config, which names a JSON file.
  void add_config(CLI::App& app);
  // Adds a setting's flag to its group of the help, with its value as the default.
  CLI::Option* add(CLI::App& app, const train::Setting& setting);

  bool has_config() const { return !config_.empty(); }
  // The defaults, changed by the config file and then by the flags that were given.
  train::TrainOptions read(const CLI::App& app) const;

 private:
  std::string config_;
  // By the setting's name; filled by CLI11.
  std::map<std::string, std::vector<std::string>> values_;
  std::map<std::string, bool> flags_;
};

// A trained model and the tokenizer of its text, as typed.
struct TrainedModelFlags {
  train::InferenceOptions model;
  std::string tokenizer = "auto";

  void add(CLI::App& app);
  // UsageError without a checkpoint.
  void check() const;
};

}  // namespace fsdp::cli
