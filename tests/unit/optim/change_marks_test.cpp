// Marks of changed weights: exactly those whose bits an update changes, for all types and cuts.
#include "fsdp/optim/kernels/update_span.h"

#include <gtest/gtest.h>

#include <cstring>
#include <functional>
#include <string>
#include <vector>

#include "fsdp/base/text.h"
#include "fsdp/optim/kernels/update_kernels.h"
#include "fsdp/optim/kernels/update_math.h"
#include "support/update_case.h"

namespace fsdp::change_marks_test {
namespace {

using testing::all_update_types;
using testing::text_of;
using testing::UpdateMemory;
using testing::UpdateTypes;

using Update = std::function<void(const UpdateSpan&, const StepState&, ElementRange)>;

struct NamedUpdate {
  std::string name;
  Update update;
};

std::vector<NamedUpdate> updates() {
  const auto adamw = [](Rounding rounding) -> Update {
    return [rounding](const UpdateSpan& span, const StepState& state, ElementRange range) {
      adamw_on_cpu(span, {.beta2 = 0.99, .rounding = rounding, .seed = 5}, state, range);
    };
  };
  const auto sgd = [](double momentum) -> Update {
    return [momentum](const UpdateSpan& span, const StepState& state, ElementRange range) {
      sgd_on_cpu(span, {.momentum = momentum}, state, range);
    };
  };
  return {{"AdamW", adamw(Rounding::kNearest)},
          {"AdamW with random rounding", adamw(Rounding::kStochastic)},
          {"SGD", sgd(0.0)},
          {"SGD with momentum", sgd(0.9)}};
}

// A rate at which some weights of every type change, and some do not.
StepState begun(int64_t steps, double rate = 2e-4) {
  StepState state{.learning_rate = rate};
  for (int64_t step = 0; step < steps; ++step) begin_step(state, {.beta1 = 0.9, .beta2 = 0.99});
  return state;
}

UpdateMemory drawn(const UpdateTypes& types, int64_t numel, int64_t flat_begin) {
  UpdateMemory memory(types, numel, flat_begin);
  memory.draw_weights(1);
  memory.keep_marks();
  return memory;
}

FlatRange flat_of(const UpdateMemory& memory) {
  return {memory.flat_begin, memory.flat_begin + memory.numel};
}

std::vector<int64_t> marked(const UpdateMemory& memory) {
  std::vector<int64_t> positions;
  find_marked(memory.marks.data(), memory.flat_begin, flat_of(memory), positions);
  return positions;
}

std::vector<int64_t> changed(const UpdateMemory& before, const UpdateMemory& after) {
  const int64_t width = element_bytes(before.types.weight);
  std::vector<int64_t> positions;
  for (int64_t i = 0; i < before.numel; ++i)
    if (std::memcmp(before.weight.data() + i * width, after.weight.data() + i * width,
                    static_cast<size_t>(width)) != 0)
      positions.push_back(before.flat_begin + i);
  return positions;
}

// One step, cut as threads cut it.
void take_step(UpdateMemory& memory, const Update& update, int64_t step, int64_t pieces) {
  memory.draw_gradients(static_cast<uint32_t>(step) + 10);
  const UpdateSpan span = memory.span();
  for (int64_t i = 0; i < pieces; ++i) update(span, begun(step), piece_of_span(span, i, pieces));
}

TEST(ChangeMarks, AreTheWeightsWhoseBitsChange) {
  int64_t num_changed = 0;
  int64_t num_all = 0;
  for (const UpdateTypes& types : all_update_types())
    for (const auto& [name, update] : updates()) {
      const std::string what = concat(name, ": ", text_of(types));
      UpdateMemory memory = drawn(types, 2300, 1211);  // ends of blocks are cut at both sides
      UpdateMemory unmarked = memory;
      unmarked.marks.clear();
      for (int64_t step = 1; step <= 2; ++step) {
        const UpdateMemory before = memory;
        memory.keep_marks();
        take_step(memory, update, step, 3);
        take_step(unmarked, update, step, 1);
        ASSERT_EQ(marked(memory), changed(before, memory)) << what;
        num_changed += static_cast<int64_t>(changed(before, memory).size());
        num_all += memory.numel;
      }
      UpdateMemory without = memory;
      without.marks.clear();
      ASSERT_TRUE(without == unmarked) << what;  // marks change nothing else
    }
  EXPECT_GT(num_changed, num_all / 10);
  EXPECT_LT(num_changed, num_all * 9 / 10);
}

TEST(ChangeMarks, GatherOverSteps) {
  const UpdateTypes types{.weight = DType::kBFloat16, .main = MainWeight::kSplit};
  UpdateMemory memory = drawn(types, 5000, 64);
  std::vector<bool> ever(5000, false);
  for (int64_t step = 1; step <= 5; ++step) {
    const UpdateMemory before = memory;
    take_step(memory, updates()[0].update, step, 1);
    for (const int64_t position : changed(before, memory))
      ever[static_cast<size_t>(position - 64)] = true;
  }
  std::vector<int64_t> expected;
  for (size_t i = 0; i < ever.size(); ++i)
    if (ever[i]) expected.push_back(static_cast<int64_t>(i) + 64);
  EXPECT_EQ(marked(memory), expected);
}

TEST(ChangeMarks, ASkippedStepMarksNothing) {
  UpdateMemory memory = drawn({.weight = DType::kBFloat16, .main = MainWeight::kSplit}, 1000, 0);
  memory.draw_gradients(3);
  StepState state = begun(1, 1.0);
  state.skips = 1;
  for (const auto& [name, update] : updates()) update(memory.span(), state, {0, 1000});
  EXPECT_TRUE(marked(memory).empty());
}

// Offloading cuts like this: chunks of a span, each with memory of its own for weights, which lie
// on a device.
TEST(ChangeMarks, NeedNoOldWeightBesideAMainWeight) {
  for (const DType weight : {DType::kBFloat16, DType::kFloat16}) {
    const UpdateTypes types{.weight = weight, .main = MainWeight::kSeparate};
    UpdateMemory whole = drawn(types, 3000, 100);
    UpdateMemory before = whole;
    UpdateMemory cut = whole;
    take_step(whole, updates()[0].update, 1, 1);
    cut.draw_gradients(11);
    std::fill(cut.weight.begin(), cut.weight.end(), std::byte{0x55});
    const UpdateSpan span = cut.span();
    for (int64_t begin = 0; begin < span.numel;) {
      const int64_t count =
          std::min(kScaleBlock * 3 - (span.flat_begin + begin) % kScaleBlock, span.numel - begin);
      const UpdateSpan part = part_of_span(span, begin, count);
      updates()[0].update(part, begun(1), {0, count});
      begin += count;
    }
    EXPECT_EQ(marked(cut), marked(whole)) << name_of(weight);
    EXPECT_EQ(marked(whole), changed(before, whole)) << name_of(weight);
  }
}

}  // namespace
}  // namespace fsdp::change_marks_test
