// The charts of runs over their steps: losses, learning rate, gradient norm and speed.
#pragma once

#include <initializer_list>
#include <span>
#include <string>

#include "fsdp/train/log/run_history.h"

namespace fsdp::train {

struct NamedHistory {
  std::string name = {};  // in the legend, where there are several
  const RunHistory* history = nullptr;
};

// One run has its losses in one chart; several have a colour each, and validation apart.
std::string history_charts_html(std::span<const NamedHistory> runs);
inline std::string history_charts_html(std::initializer_list<NamedHistory> runs) {
  return history_charts_html(std::span(runs.begin(), runs.size()));
}

}  // namespace fsdp::train
