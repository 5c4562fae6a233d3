// The timeline of one rank: gathers, computing, reductions and updates in their rows.
#include "fsdp/train/step_timeline.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <optional>
#include <set>

#include "fsdp/base/error.h"
#include "fsdp/comm/world.h"
#include "fsdp/nn/language_model.h"
#include "fsdp/optim/adamw.h"
#include "fsdp/shard/fully_shard.h"

namespace fsdp::train::step_timeline_test {
namespace {

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
      std::optional<StepTimeline> timeline;
      if (world.rank() == 0 && step == 2) timeline.emplace();
      model->loss(tokens, tokens).total.backward();
      optimizer.step();
      optimizer.zero_grad();
      optimizer.wait();
      if (timeline) spans = timeline->end();
    }
  });
  return spans;
}

TEST(StepTimeline, HasARowForEachKindOfWork) {
  const std::vector<TimelineSpan> spans = timeline_of_a_step();
  std::set<std::string> rows;
  std::set<std::string> gathered;
  for (const TimelineSpan& span : spans) {
    rows.insert(span.row);
    if (span.row == "gather") gathered.insert(span.label);
    EXPECT_LE(span.begin_us, span.end_us);
    EXPECT_GE(span.begin_us, 0);
  }
  EXPECT_THAT(rows, testing::UnorderedElementsAre("compute", "gather", "reduce", "update"));
  // Embedding, two layers and the head, each by its name.
  EXPECT_EQ(gathered.size(), 4U);
  EXPECT_TRUE(gathered.contains("model.layers.1 weight")) << *gathered.begin();
}

TEST(StepTimeline, ComputingIsNotCountedTwice) {
  double end = 0;
  for (const TimelineSpan& span : timeline_of_a_step()) {
    if (span.row != "compute") continue;
    EXPECT_GE(span.begin_us, end);
    end = span.end_us;
  }
  EXPECT_GT(end, 0);
}

TEST(StepTimeline, OneAtATime) {
  const StepTimeline timeline;
  EXPECT_THROW(StepTimeline(), Error);
}

TEST(StepTimeline, RecordsNothingAfterItsEnd) {
  StepTimeline timeline;
  const std::vector<TimelineSpan> before = timeline.end();
  at::ones({4}).add_(1);
  EXPECT_EQ(timeline.end().size(), before.size());
}

}  // namespace
}  // namespace fsdp::train::step_timeline_test
