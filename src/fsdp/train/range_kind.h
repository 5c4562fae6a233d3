// What a named range of the engine is about, for timelines and traces.
#pragma once

#include <array>
#include <string_view>

namespace fsdp::train {

struct RangeKind {
  std::string_view prefix;
  const char* kind;
};

// Ranges that do work, by the beginning of their names; the others only queue some.
inline constexpr std::array<RangeKind, 6> kRangeKinds = {{
    {"fsdp::comm all_gather", "gather"},
    {"fsdp::comm reduce_scatter", "reduce"},
    {"fsdp::comm all_to_all", "reduce"},
    {"fsdp::comm all_reduce", "reduce"},
    {"fsdp::update_unit", "update"},
    {"fsdp::update_on_host", "update"},
}};

// nullptr: none of them.
inline const RangeKind* find_range_kind(std::string_view name) {
  for (const RangeKind& each : kRangeKinds)
    if (name.starts_with(each.prefix)) return &each;
  return nullptr;
}

}  // namespace fsdp::train
