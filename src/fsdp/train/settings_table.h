// The tables a run begins with: every setting, and the memory that it should need.
#pragma once

#include <cstdint>
#include <span>
#include <string>

#include "fsdp/train/run_facts.h"

namespace fsdp::train {

// Settings by group, in as many columns as fit `width` characters; changed ones have a `*` before
// their name. "" without settings.
std::string settings_table(std::span<const SettingRow> settings, int64_t width);

// Forecast per kind on the fullest rank, with a total per place. "" where nothing is forecast.
std::string forecast_table(std::span<const MemoryRow> memory);

}  // namespace fsdp::train
