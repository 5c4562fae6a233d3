// Spans of ranks as a trace that Perfetto and chrome://tracing open.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace fsdp::train {

struct TraceSpan {
  // A row of the trace; spans of a row are nested or apart.
  int64_t thread = 0;
  std::string name = {};
  const char* kind = "";  // "compute", "gather", "step", ...
  int64_t begin_ns = 0;
  int64_t end_ns = 0;
};

struct TraceThread {
  int64_t thread = 0;
  std::string name = {};
};

// The events of one rank, to be joined with those of others. Times are from `base_ns` on.
std::string trace_events(int rank, std::span<const TraceThread> threads,
                         std::span<const TraceSpan> spans, int64_t base_ns);

// The whole file; no events are a trace, too.
std::string trace_document(std::span<const std::string> events_of_ranks);

}  // namespace fsdp::train
