// The parts of the report's page that are not charts: memory, checkpoints, settings, environment.
#pragma once

#include <span>
#include <string>

#include "fsdp/train/log/run_history.h"
#include "fsdp/train/log/run_records.h"

namespace fsdp::train {

// Each is a section of the page, or "" where there is nothing to show.
std::string memory_html(const RunFacts& facts);
std::string checkpoints_html(const RunHistory& history);
std::string outliers_html(const RunHistory& history);
std::string settings_html(std::span<const SettingRow> rows);
std::string environment_html(std::span<const EnvironmentRow> rows);

// Whose memory a step's peak is: "of rank 0's GPU", or "of the process".
std::string peak_owner(const RunFacts& facts);

}  // namespace fsdp::train
