// How the report looks, and the script that reads out its charts.
#pragma once

#include <string_view>

namespace fsdp::train {

std::string_view report_style();

// Without it everything is shown, too; with it, a pointer over a chart reads out the figures there.
std::string_view report_script();

}  // namespace fsdp::train
