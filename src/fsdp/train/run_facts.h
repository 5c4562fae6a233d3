// What is known of a run besides its steps: settings, environment, memory, one step's timeline.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace fsdp::train {

struct SettingRow {
  // "model", "data", "sharding": settings of a group are shown together, groups in order of their
  // first setting.
  std::string group = {};
  std::string name = {};
  std::string value = {};
  bool is_changed = false;  // it is not the default
  std::string help = {};
};

struct EnvironmentRow {
  std::string name = {};
  std::string value = {};
};

constexpr int64_t kUnknownBytes = -1;

// One kind of memory on the fullest rank.
struct MemoryRow {
  std::string kind = {};
  int64_t forecast_bytes = kUnknownBytes;
  int64_t measured_bytes = kUnknownBytes;
  bool is_on_host = false;  // beside a device: not part of its memory
};

// Something that took time in a step. Spans of a row may lie in each other.
struct TimelineSpan {
  std::string row = {};  // "compute", "gather", "reduce", "update"
  double begin_us = 0;
  double end_us = 0;
  std::string label = {};
};

struct RunFacts {
  std::string title = {};  // "tiny: Llama, 1.8 M parameters, 2 ranks"
  std::vector<SettingRow> settings = {};
  std::vector<EnvironmentRow> environment = {};
  std::vector<MemoryRow> memory = {};
  // This run goes on after that step; 0: it is a new one.
  int64_t resumed_step = 0;
};

// Text that the model wrote.
struct TextSample {
  int64_t step = 0;
  std::string prompt = {};
  std::string continuation = {};
};

}  // namespace fsdp::train
