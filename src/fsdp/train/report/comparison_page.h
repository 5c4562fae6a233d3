// Several runs on one page: curves in one chart, figures and settings side by side.
#pragma once

#include <span>
#include <string>

#include "fsdp/train/log/logged_run.h"

namespace fsdp::train {

// As many as colours and dashes tell apart.
inline constexpr size_t kMaxComparedRuns = 16;

// `time` is in seconds since 1970. Takes some hundred kilobytes per run at most.
std::string comparison_page(std::span<const LoggedRun> runs, double time);

}  // namespace fsdp::train
