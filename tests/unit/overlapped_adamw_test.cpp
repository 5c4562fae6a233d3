// Whole spans against one element at a time: loops that work on groups of elements round as the one
// that does not, whatever the numbers are.
#include <gtest/gtest.h>

#include <bit>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "fsdp/optim/begin_step.h"
#include "fsdp/optim/update_on_cpu.h"
#include "support/update_case.h"

namespace fsdp {
namespace {

using testing::text_of;
using testing::UpdateMemory;
using testing::UpdateTypes;

std::vector<UpdateTypes> types_with_wide_moments() {
  std::vector<UpdateTypes> chosen;
  for (const UpdateTypes& types : testing::all_update_types())
    if (types.first == DType::kFloat32 && types.second == DType::kFloat32) chosen.push_back(types);
  return chosen;
}

StepState begun(double rate) {
  StepState state{.learning_rate = rate};
  for (int step = 0; step < 5; ++step) begin_step(state, {});
  return state;
}

// The same step on the whole span, and on its elements one by one.
void expect_same(const UpdateMemory& before, const AdamWRule& rule, double rate) {
  UpdateMemory whole = before;
  UpdateMemory cut = before;
  const UpdateSpan whole_span = whole.span();
  const UpdateSpan cut_span = cut.span();
  const StepState state = begun(rate);
  adamw_on_cpu(whole_span, rule, state, {.begin = 0, .end = whole.numel});
  for (int64_t i = 0; i < cut.numel; ++i)
    adamw_on_cpu(cut_span, rule, state, {.begin = i, .end = i + 1});
  EXPECT_EQ(whole.first, cut.first) << text_of(before.types);
  EXPECT_EQ(whole.second, cut.second) << text_of(before.types);
  EXPECT_EQ(whole.weight, cut.weight) << text_of(before.types);
  EXPECT_EQ(whole.main_weight, cut.main_weight) << text_of(before.types);
}

float* floats(UpdateMemory::Bytes& bytes) { return reinterpret_cast<float*>(bytes.data()); }

UpdateMemory trained(const UpdateTypes& types, int64_t numel) {
  UpdateMemory memory(types, numel, 77);
  memory.draw_weights(1);
  memory.draw_gradients(2);
  const UpdateSpan span = memory.span();
  adamw_on_cpu(span, {}, begun(0.01), {.begin = 0, .end = numel});
  memory.draw_gradients(3);
  return memory;
}

TEST(OverlappedAdamW, RoundsLikeOneElementAtATime) {
  for (const UpdateTypes& types : types_with_wide_moments())
    for (const int64_t numel : {15, 16, 17, 31, 32, 47, 48, 49, 80, 2003})
      expect_same(trained(types, numel), {}, 0.01);
}

// Moments and gradients that no quotient by multiplications can be found for, among others that it
// can.
TEST(OverlappedAdamW, RoundsLikeOneElementAtATimeWhateverTheMomentsAre) {
  constexpr float kInf = std::numeric_limits<float>::infinity();
  const float firsts[] = {0.0f,    -0.0f,   1e-45f,   -1e-40f, 0x1p-64f, 0x1.8p-63f, 1.0f,
                          0x1p65f, 3.4e38f, -3.4e38f, kInf,    -kInf,    NAN,        -0x1p-20f};
  const float seconds[] = {0.0f, 1e-45f, 1e-38f, 0x1.fffffep-1f, 1.0f, 0x1p65f, 3.4e38f, kInf, NAN};
  constexpr int64_t kNumel = 4001;
  for (const UpdateTypes& types : types_with_wide_moments()) {
    UpdateMemory memory = trained(types, kNumel);
    std::mt19937 random(5);
    for (int64_t i = 0; i < kNumel; ++i) {
      if (random() % 16 == 0) floats(memory.first)[i] = firsts[random() % std::size(firsts)];
      if (random() % 16 == 0) floats(memory.second)[i] = seconds[random() % std::size(seconds)];
      // Half of the gradients 0: then a moment of a power of two stays one for a beta of 1/2.
      if (random() % 2 == 0)
        std::memset(memory.gradient.data() + i * element_bytes(types.gradient), 0,
                    static_cast<size_t>(element_bytes(types.gradient)));
    }
    expect_same(memory, {}, 0.01);
    expect_same(memory, {.beta1 = 0.5}, 0.01);
  }
}

TEST(OverlappedAdamW, RoundsLikeOneElementAtATimeWhateverTheFactorsAre) {
  for (const UpdateTypes& types : types_with_wide_moments()) {
    const UpdateMemory memory = trained(types, 1000);
    for (const double rate : {0.0, 1e-30, 1e-12, 1e-6, 1.0, 1e6, 1e20, -1e-3})
      for (const double eps : {0.0, 1e-38, 1e-20, 1e-8, 1.0, 1e15}) {
        SCOPED_TRACE(concat("rate ", rate, ", eps ", eps));
        expect_same(memory, {.eps = eps}, rate);
      }
  }
}

TEST(OverlappedAdamW, NansOfAnyBitsBecomeTheUsualOne) {
  const uint32_t nans[] = {0x7FC00000u, 0x7FFFFFFFu, 0xFFFFFFFFu, 0x7F800001u, 0xFFC12345u};
  const UpdateTypes types{.weight = DType::kBFloat16, .main = MainWeight::kSplit};
  UpdateMemory memory = trained(types, 500);
  for (int64_t i = 0; i < 500; i += 3)
    floats(memory.gradient)[i] = std::bit_cast<float>(nans[static_cast<size_t>(i) % 5]);
  expect_same(memory, {}, 0.01);
  const UpdateSpan span = memory.span();
  adamw_on_cpu(span, {}, begun(0.01), {.begin = 0, .end = 500});
  for (int64_t i = 0; i < 500; ++i) {
    uint16_t upper = 0;
    std::memcpy(&upper, memory.weight.data() + 2 * i, 2);
    EXPECT_EQ(upper == 0x7FC0, i % 3 == 0) << i;
  }
}

}  // namespace
}  // namespace fsdp
