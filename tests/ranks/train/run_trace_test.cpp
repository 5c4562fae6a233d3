// The recorder of steps, its timeline and its trace; tests/processes/trace_test.py traces whole
// runs.
#include "fsdp/train/run_trace.h"

#include <ATen/ATen.h>
#include <ATen/record_function.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>

#include "fsdp/comm/communicator.h"
#include "fsdp/nn/language_model.h"
#include "fsdp/optim/adamw.h"
#include "fsdp/shard/fully_shard.h"

namespace fsdp::train::run_trace_test {
namespace {

using ::testing::Contains;
using ::testing::ElementsAre;
using ::testing::Not;
using Json = nlohmann::json;

const c10::Device kCpu(c10::DeviceType::CPU);

std::vector<std::string> names_in(const RecordedTrace& trace) {
  std::vector<std::string> names;
  for (const TraceSpan& span : trace.spans) names.push_back(span.name);
  return names;
}

RecordedTrace trace_of_a_step(TraceDetail detail) {
  StepRecorder recorder(detail, kCpu);
  recorder.begin_step();
  {
    RECORD_FUNCTION("fsdp::update", {});
    at::ones({4}).add_(1);
  }
  recorder.end_step(3);
  return recorder.end();
}

TEST(StepRecorder, HasTheScheduleOrEveryOperator) {
  EXPECT_THAT(names_in(trace_of_a_step(TraceDetail::kSchedule)),
              ElementsAre("fsdp::update", "step 3"));
  EXPECT_THAT(names_in(trace_of_a_step(TraceDetail::kAll)), Contains("aten::add_"));
}

TEST(StepRecorder, KeepsRanksApart) {
  std::vector<RecordedTrace> traces(2);
  run_threads(2, {}, [&](World& world) {
    StepRecorder recorder(TraceDetail::kSchedule, kCpu);
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

TEST(StepRecorder, LetsOthersRecordTheSameRankAndEndsAlone) {
  StepRecorder first(TraceDetail::kAll, kCpu);
  StepRecorder second(TraceDetail::kAll, kCpu);
  at::ones({4});
  EXPECT_THAT(names_in(first.end()), Contains("aten::ones"));
  at::zeros({4});
  EXPECT_TRUE(first.end().spans.empty());
  const std::vector<std::string> names = names_in(second.end());
  EXPECT_THAT(names, Contains("aten::ones"));
  EXPECT_THAT(names, Contains("aten::zeros"));
  EXPECT_THAT(names_in(trace_of_a_step(TraceDetail::kSchedule)), Not(Contains("aten::ones")));
}

const LlamaConfig kModel{.vocab_size = 257,
                         .hidden_size = 32,
                         .num_hidden_layers = 2,
                         .num_attention_heads = 2,
                         .num_key_value_heads = 2,
                         .intermediate_size = 48};

std::vector<TimelineSpan> timeline_of_a_step() {
  std::vector<TimelineSpan> spans;
  run_threads(2, {}, [&](World& world) {
    const Mesh mesh = world.mesh();
    const std::shared_ptr<LanguageModel> model = build_language_model(kModel);
    const Sharded sharded = fully_shard(std::static_pointer_cast<torch::nn::Module>(model), mesh);
    AdamW optimizer(sharded);
    const at::Tensor tokens = at::arange(64, at::kLong).view({2, 32});
    for (int step = 0; step < 3; ++step) {
      std::optional<StepRecorder> recorder;
      if (world.rank() == 0 && step == 2) recorder.emplace(TraceDetail::kAll, kCpu);
      model->loss(tokens, tokens).total.backward();
      optimizer.step();
      optimizer.zero_grad();
      optimizer.wait();
      if (recorder) spans = timeline_of(recorder->end());
    }
  });
  return spans;
}

TEST(Timeline, HasARowForEachKindOfWorkAndCountsComputingOnce) {
  std::set<std::string> rows;
  std::set<std::string> gathered;
  double computed_until = 0;
  for (const TimelineSpan& span : timeline_of_a_step()) {
    rows.insert(span.row);
    if (span.row == "gather") gathered.insert(span.label);
    EXPECT_LE(span.begin_us, span.end_us);
    EXPECT_GE(span.begin_us, 0);
    if (span.row != "compute") continue;
    EXPECT_GE(span.begin_us, computed_until);
    computed_until = span.end_us;
  }
  EXPECT_THAT(rows, testing::UnorderedElementsAre("compute", "gather", "reduce", "update"));
  // Embedding, two layers and the head, each by its name.
  EXPECT_EQ(gathered.size(), 4U);
  EXPECT_TRUE(gathered.contains("model.layers.1 weight")) << *gathered.begin();
}

TEST(ChromeTrace, HasRanksAsProcessesAndTimesFromTheBeginning) {
  const std::vector<TraceThread> threads = {{0, "compute"}, {1, "gather"}};
  const std::vector<TraceSpan> spans = {{1, "all_gather \"x\" \xff", "gather", 5000, 7500}};
  const std::vector<std::string> events = {trace_events(0, {threads, {}}, 0),
                                           trace_events(3, {threads, spans}, 1000)};
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
  EXPECT_EQ(Json::parse(trace_document({})).at("traceEvents"), Json::array());
  EXPECT_EQ(trace.at("traceEvents").size(), 2 * 2 * (1 + 2) + 1);  // names and places, and the span
}

}  // namespace
}  // namespace fsdp::train::run_trace_test
