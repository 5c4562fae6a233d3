// The parts of the report that are lists: memory, checkpoints, settings, environment.
#pragma once

#include <span>
#include <string>

#include "fsdp/train/run_facts.h"
#include "fsdp/train/run_history.h"

namespace fsdp::train {

// Each is a section of the page, or "" where there is nothing to show.
std::string memory_html(std::span<const MemoryRow> rows);
std::string checkpoints_html(const RunHistory& history);
std::string outliers_html(const RunHistory& history);
std::string settings_html(std::span<const SettingRow> rows);
std::string environment_html(std::span<const EnvironmentRow> rows);

}  // namespace fsdp::train
