// The trace as text; tests/processes/trace_test.py traces a run.
#include "fsdp/train/log/chrome_trace.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

namespace fsdp::train::chrome_trace_test {
namespace {

using Json = nlohmann::json;

TEST(ChromeTrace, HasRanksAsProcessesAndTimesFromTheBeginning) {
  const std::vector<TraceThread> threads = {{0, "compute"}, {1, "gather"}};
  const std::vector<TraceSpan> spans = {{1, "all_gather \"x\" \xff", "gather", 5000, 7500}};
  const std::vector<std::string> events = {trace_events(0, threads, {}, 0),
                                           trace_events(3, threads, spans, 1000)};
  const Json trace = Json::parse(trace_document(events));
  std::vector<Json> found;
  for (const Json& event : trace.at("traceEvents"))
    if (event.at("ph") == "X") found.push_back(event);
  ASSERT_EQ(found.size(), 1);
  EXPECT_EQ(found[0].at("name"), "all_gather \"x\" \xef\xbf\xbd");
  EXPECT_EQ(found[0].at("cat"), "gather");
  EXPECT_EQ(found[0].at("pid"), 3);
  EXPECT_EQ(found[0].at("tid"), 1);
  EXPECT_EQ(found[0].at("ts"), 4.0);  // in microseconds
  EXPECT_EQ(found[0].at("dur"), 2.5);
  EXPECT_EQ(trace.at("traceEvents").size(), 2 * 2 * (1 + 2) + 1);  // names and places, and the span
}

TEST(ChromeTrace, IsWholeWithoutSpans) {
  EXPECT_EQ(Json::parse(trace_document({})).at("traceEvents"), Json::array());
}

}  // namespace
}  // namespace fsdp::train::chrome_trace_test
