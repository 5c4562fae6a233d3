#include "fsdp/train/log/chrome_trace.h"

#include <array>
#include <cstdio>
#include <nlohmann/json.hpp>
#include <string_view>

#include "fsdp/base/text.h"

namespace fsdp::train {

namespace {

// Names of kernels and operators come from others and need not be UTF-8.
std::string json_string(std::string_view text) {
  return nlohmann::json(text).dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
}

// The format counts in microseconds.
std::string microseconds_text(int64_t ns) {
  std::array<char, 32> text{};
  std::snprintf(text.data(), text.size(), "%.3f", static_cast<double>(ns) / 1000);
  return text.data();
}

// A fact about a process or one of its threads, and the place among its like.
std::string name_event(const char* what, const std::string& place, const std::string& name,
                       int64_t index) {
  return concat("{\"ph\":\"M\",\"name\":\"", what, "_name\",", place,
                ",\"args\":{\"name\":", json_string(name), "}},\n{\"ph\":\"M\",\"name\":\"", what,
                "_sort_index\",", place, ",\"args\":{\"sort_index\":", index, "}}");
}

}  // namespace

std::string trace_events(int rank, std::span<const TraceThread> threads,
                         std::span<const TraceSpan> spans, int64_t base_ns) {
  const std::string process = concat("\"pid\":", rank);
  std::string events = name_event("process", process, concat("rank ", rank), rank);
  for (const TraceThread& each : threads)
    events += ",\n" + name_event("thread", concat(process, ",\"tid\":", each.thread), each.name,
                                 each.thread);
  for (const TraceSpan& span : spans)
    events += concat(",\n{\"ph\":\"X\",\"name\":", json_string(span.name), ",\"cat\":\"", span.kind,
                     "\",", process, ",\"tid\":", span.thread,
                     ",\"ts\":", microseconds_text(span.begin_ns - base_ns),
                     ",\"dur\":", microseconds_text(span.end_ns - span.begin_ns), "}");
  return events;
}

std::string trace_document(std::span<const std::string> events_of_ranks) {
  return concat("{\"displayTimeUnit\":\"ms\",\"traceEvents\":[\n", join(events_of_ranks, ",\n"),
                "\n]}\n");
}

}  // namespace fsdp::train
