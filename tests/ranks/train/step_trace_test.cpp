// The recorder of a trace; tests/processes/trace_test.py traces whole runs.
#include "fsdp/train/step_trace.h"

#include <ATen/ATen.h>
#include <ATen/record_function.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>

#include "fsdp/base/error.h"
#include "fsdp/comm/communicator.h"
#include "fsdp/comm/world.h"

namespace fsdp::train::step_trace_test {
namespace {

using ::testing::Contains;
using ::testing::ElementsAre;
using ::testing::Not;

const c10::Device kCpu(c10::DeviceType::CPU);

std::vector<std::string> names_in(const RecordedTrace& trace) {
  std::vector<std::string> names;
  for (const TraceSpan& span : trace.spans) names.push_back(span.name);
  return names;
}

RecordedTrace trace_of_a_step(TraceDetail detail) {
  StepTrace recorder(detail, kCpu);
  recorder.begin_step();
  {
    RECORD_FUNCTION("fsdp::update", {});
    at::ones({4}).add_(1);
  }
  recorder.end_step(3);
  return recorder.end();
}

TEST(StepTrace, HasTheScheduleOrEveryOperator) {
  EXPECT_THAT(names_in(trace_of_a_step(TraceDetail::kSchedule)),
              ElementsAre("fsdp::update", "step 3"));
  EXPECT_THAT(names_in(trace_of_a_step(TraceDetail::kAll)), Contains("aten::add_"));
}

TEST(StepTrace, KeepsRanksApart) {
  std::vector<RecordedTrace> traces(2);
  run_threads(2, {}, [&](World& world) {
    StepTrace recorder(TraceDetail::kSchedule, kCpu);
    world.communicator().barrier("all record").wait();
    for (int i = 0; i <= world.rank(); ++i) {
      RECORD_FUNCTION("fsdp::update", {});
    }
    traces[static_cast<size_t>(world.rank())] = recorder.end();
  });
  for (size_t rank = 0; rank < traces.size(); ++rank) {
    const std::vector<std::string> names = names_in(traces[rank]);
    EXPECT_EQ(static_cast<size_t>(std::count(names.begin(), names.end(), "fsdp::update")),
              rank + 1);
  }
}

TEST(StepTrace, OneAtATimeAndNothingAfterItsEnd) {
  StepTrace recorder(TraceDetail::kAll, kCpu);
  EXPECT_THROW(StepTrace(TraceDetail::kAll, kCpu), Error);
  at::ones({4});
  EXPECT_FALSE(recorder.end().spans.empty());
  at::ones({4});
  EXPECT_TRUE(recorder.end().spans.empty());
  EXPECT_THAT(names_in(trace_of_a_step(TraceDetail::kSchedule)), Not(Contains("aten::ones")));
}

}  // namespace
}  // namespace fsdp::train::step_trace_test
