#include "fsdp/cli/setting_flags.h"

#include <cstdint>

#include "fsdp/base/check.h"
#include "fsdp/base/durable_file.h"
#include "fsdp/base/text.h"

namespace fsdp::cli {

namespace {

constexpr int64_t kMaxSettingsBytes = int64_t{1} << 24;

}  // namespace

void SettingFlags::add_config(CLI::App& app) {
  app.add_option("--config", config_, "Settings of fsdp train from a file; flags win")
      ->type_name("FILE.json");
}

CLI::Option* SettingFlags::add(CLI::App& app, const train::Setting& setting) {
  const std::string& name = setting.name;
  CLI::Option* option = nullptr;
  if (setting.kind == train::SettingKind::kFlag) {
    option = app.add_flag(concat("--", name, ",!--no-", name), flags_[name], setting.help);
  } else {
    option = app.add_option("--" + name, values_[name], setting.help)
                 ->type_name(setting.type)
                 ->default_str(join(setting.values, " "));
    option->expected(
        1, setting.kind == train::SettingKind::kList ? CLI::detail::expected_max_vector_size : 1);
  }
  return option->group(setting.group);
}

train::TrainOptions SettingFlags::read(const CLI::App& app) const {
  train::TrainOptions options;
  if (app.count("--config") > 0 && config_.empty())
    throw UsageError("--config is empty; name a JSON file, e.g. --config run.json");
  if (has_config())
    train::apply_config(options, read_text_file(config_, kMaxSettingsBytes), config_);
  train::GivenValues given;
  for (const auto& [name, values] : values_)
    if (app.count("--" + name) > 0) given[name] = values;
  for (const auto& [name, flag] : flags_)
    if (app.count("--" + name) > 0) given[name] = {flag ? "true" : "false"};
  train::apply_given(options, given);
  return options;
}

void TrainedModelFlags::add(CLI::App& app) {
  const auto option = [&](const char* name, std::string& value, const char* type,
                          const char* text) {
    app.add_option(name, value, text)->type_name(type)->capture_default_str();
  };
  option("--checkpoint", model.path, "PATH",
         "A run's directory (its latest checkpoint), a checkpoint, or safetensors files");
  option("--model", model.model, "NAME|PATH", "The model, where the checkpoint has no config.json");
  option("--tokenizer", tokenizer, "PATH|bytes",
         "A tokenizer.json or a directory with one; auto: the checkpoint's, or bytes");
  option("--device", model.device, "NAME", "auto, cpu or cuda");
  option("--compute", model.compute, "DTYPE", "auto: fp32 on CPUs, bf16 on GPUs");
}

void TrainedModelFlags::check() const {
  if (model.path.empty())
    throw UsageError(
        "--checkpoint is missing; give a run's directory, a checkpoint, or a "
        "directory of safetensors files");
}

}  // namespace fsdp::cli
