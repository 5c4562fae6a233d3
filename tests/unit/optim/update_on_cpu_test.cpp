// The fused updates against the formulas in fp64, over all types, and how they may be cut.
#include "fsdp/optim/kernels/update_kernels.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <vector>

#include "fsdp/base/error.h"
#include "fsdp/base/narrow_float.h"
#include "fsdp/optim/kernels/update_math.h"
#include "support/update_case.h"

namespace fsdp::update_on_cpu_test {
namespace {

using testing::all_update_types;
using ::testing::HasSubstr;
using testing::text_of;
using ::testing::ThrowsMessage;
using testing::UpdateMemory;
using testing::UpdateTypes;

constexpr double kRate = 0.01;
const AdamWRule kAdamW{.beta1 = 0.9, .beta2 = 0.99, .eps = 1e-8, .seed = 5};

StepState begun(int64_t steps, double squared_norm = 1.0, double max_norm = 0.0) {
  StepState state{.learning_rate = kRate};
  for (int64_t step = 0; step < steps; ++step) {
    state.squared_norm = squared_norm;
    begin_step(state, {.beta1 = kAdamW.beta1, .beta2 = kAdamW.beta2, .max_norm = max_norm});
  }
  return state;
}

void adamw(UpdateMemory& memory, const StepState& state, const AdamWRule& rule = kAdamW) {
  const UpdateSpan span = memory.span();
  adamw_on_cpu(span, rule, state, {.begin = 0, .end = span.numel});
}

UpdateMemory drawn(const UpdateTypes& types, int64_t numel, int64_t flat_begin) {
  UpdateMemory memory(types, numel, flat_begin);
  memory.draw_weights(1);
  memory.draw_gradients(2);
  return memory;
}

// Three steps: moments are 0, from one gradient, and from two.
UpdateMemory after_three_steps(const UpdateTypes& types, int64_t numel, int64_t flat_begin,
                               const AdamWRule& rule = kAdamW) {
  UpdateMemory memory = drawn(types, numel, flat_begin);
  for (uint32_t step = 1; step <= 3; ++step) {
    memory.draw_gradients(step + 10);
    adamw(memory, begun(step), rule);
  }
  return memory;
}

// --- against fp64 --------------------------------------------------------------------------------

// And the magnitudes of the terms that were added, of which rounding errors are a part.
struct Expected {
  double weight, first, second;
  double weight_terms, first_terms;
};

Expected expected_adamw(const UpdateMemory& before, int64_t i, const StepState& state) {
  const double g = testing::decoded(before.types.gradient, before.gradient.data(), i) *
                   static_cast<double>(state.gradient_factor);
  const double rate = kRate * 0.5;  // UpdateMemory's rate_scale
  const double t = static_cast<double>(state.step);
  const double m = before.first_value(i) * 0.9 + g * 0.1;
  const double v = before.second_value(i) * 0.99 + g * g * 0.01;
  const double m_hat = m / (1 - std::pow(0.9, t));
  const double v_hat = v / (1 - std::pow(0.99, t));
  const double decayed = before.main_value(i) * (1 - rate * 0.125);
  const double change = rate * m_hat / (std::sqrt(v_hat) + 1e-8);
  // The change inherits the error of its moment, which may be 0 as a sum of large terms.
  const double m_terms = std::abs(before.first_value(i)) * 0.9 + std::abs(g) * 0.1;
  const double change_terms = rate * m_terms / (1 - std::pow(0.9, t)) / (std::sqrt(v_hat) + 1e-8);
  return {.weight = decayed - change,
          .first = m,
          .second = v,
          .weight_terms = std::abs(decayed) + change_terms,
          .first_terms = m_terms};
}

// How far a stored number may be from the one in fp64: `ulps` of its type, and of fp32 what its own
// roundings add up to.
double tolerance(DType dtype, double value, double terms, double scale, double ulps) {
  const double of_fp32 = 4 * testing::spacing(DType::kFloat32, terms);
  if (dtype == DType::kFloat32 || scale == 0.0) return of_fp32;
  return ulps * testing::spacing(dtype, value / scale) * scale + of_fp32;
}

void expect_close(const UpdateMemory& after, int64_t i, const Expected& expected) {
  const bool is_main_wide =
      after.types.main != MainWeight::kIsWeight || after.types.weight == DType::kFloat32;
  const DType main_type = is_main_wide ? DType::kFloat32 : after.types.weight;
  ASSERT_NEAR(after.main_value(i), expected.weight,
              tolerance(main_type, expected.weight, expected.weight_terms, 1, 0.5))
      << i;
  const double main_value = after.main_value(i);
  ASSERT_NEAR(testing::decoded(after.types.weight, after.weight.data(), i), main_value,
              0.5 * testing::spacing(after.types.weight, main_value))
      << i;
  ASSERT_NEAR(after.first_value(i), expected.first,
              tolerance(after.types.first, expected.first, expected.first_terms,
                        after.scale(after.first_scales, i), 0.5))
      << i;
  // Stochastic: one whole ulp; roots where the type is scaled, and never 0.
  const double scale = after.scale(after.second_scales, i);
  if (is_scaled(after.types.second)) {
    const double root = std::sqrt(expected.second);
    ASSERT_NEAR(std::sqrt(after.second_value(i)), root,
                tolerance(after.types.second, root, root, scale, 1.0) + scale * 1e-6)
        << i;
    ASSERT_EQ(after.second_value(i) > 0, expected.second > 0) << i;
  } else {
    ASSERT_NEAR(after.second_value(i), expected.second,
                tolerance(after.types.second, expected.second, expected.second, scale, 1.0))
        << i;
  }
}

TEST(AdamWOnCpu, FollowsTheFormulasInEveryCombinationOfTypes) {
  for (const UpdateTypes& types : all_update_types()) {
    SCOPED_TRACE(text_of(types));
    UpdateMemory memory = drawn(types, 301, 77);
    for (uint32_t step = 1; step <= 3; ++step) {
      memory.draw_gradients(step + 10);
      const StepState state = begun(step, 16.0, step == 2 ? 1.0 : 0.0);  // the second step clips
      const UpdateMemory before = memory;
      adamw(memory, state);
      for (int64_t i = 0; i < memory.numel; ++i) {
        expect_close(memory, i, expected_adamw(before, i, state));
        if (HasFatalFailure()) return;
      }
    }
  }
}

TEST(AdamWOnCpu, UpdatesSpansOfAnyLength) {
  for (const int64_t numel : {0, 1, 2, 3, 127, 128, 129, 1023, 1024, 1025, 5000}) {
    UpdateMemory memory = drawn({.gradient = DType::kBFloat16}, numel, 1000);
    const UpdateMemory before = memory;
    const StepState state = begun(1);
    adamw(memory, state);
    for (int64_t i = 0; i < numel; ++i) expect_close(memory, i, expected_adamw(before, i, state));
  }
}

TEST(AdamWOnCpu, LearningRateOfZeroMovesMomentsAlone) {
  UpdateMemory memory({}, 300, 0);  // weights of 0 show the smallest change
  memory.draw_gradients(2);
  std::memset(memory.gradient.data(), 0, 4 * 10);  // and moments of 0 divide 0 by something
  const UpdateMemory before = memory;
  StepState state = begun(1);
  state.learning_rate = 0.0;
  for (const double eps : {1e-8, 0.0}) adamw(memory, state, {.eps = eps});
  EXPECT_EQ(memory.weight, before.weight);
  EXPECT_NE(memory.first, before.first);
  EXPECT_NE(memory.second, before.second);
}

TEST(AdamWOnCpu, SkippedStepsChangeNothing) {
  for (const UpdateTypes& types : all_update_types()) {
    UpdateMemory memory = after_three_steps(types, 200, 13);
    const UpdateMemory before = memory;
    StepState state = begun(4);
    state.skips = 1;
    adamw(memory, state);
    EXPECT_TRUE(memory == before) << text_of(types);
  }
}

TEST(AdamWOnCpu, PassesOnNanWhereStepsAreNotSkipped) {
  for (const UpdateTypes& types : all_update_types()) {
    if (types.gradient != DType::kFloat32) continue;
    UpdateMemory memory = drawn(types, 200, 0);
    const float nan = std::numeric_limits<float>::quiet_NaN();
    std::memcpy(memory.gradient.data() + 4 * 50, &nan, 4);
    adamw(memory, begun(1));
    EXPECT_TRUE(std::isnan(memory.main_value(50))) << text_of(types);
    EXPECT_TRUE(std::isnan(memory.first_value(50))) << text_of(types);
    EXPECT_TRUE(std::isnan(memory.second_value(50))) << text_of(types);
    EXPECT_FALSE(std::isnan(memory.main_value(49))) << text_of(types);
    EXPECT_FALSE(std::isnan(memory.second_value(51))) << text_of(types);
  }
}

// --- cut in pieces -------------------------------------------------------------------------------

TEST(PieceOfSpan, PiecesFollowEachOtherAndEndWhereBlocksOfScalesEnd) {
  for (const int64_t flat_begin : {0, 1, 127, 128, 1000})
    for (const int64_t numel : {0, 1, 127, 128, 129, 5000})
      for (const int64_t count : {1, 2, 3, 7, 64}) {
        const UpdateSpan span{.numel = numel, .flat_begin = flat_begin};
        int64_t end = 0;
        for (int64_t index = 0; index < count; ++index) {
          const ElementRange piece = piece_of_span(span, index, count);
          ASSERT_EQ(piece.begin, end);
          ASSERT_LE(piece.begin, piece.end);
          ASSERT_LE(piece.end - piece.begin, numel / count + count + kScaleBlock);
          end = piece.end;
          ASSERT_TRUE(end == numel || (flat_begin + end) % kScaleBlock == 0);
        }
        ASSERT_EQ(end, numel);
      }
}

// Pieces are ranges that threads take; parts are spans of their own.
TEST(AdamWOnCpu, PiecesAndPartsGiveTheSameBits) {
  for (const UpdateTypes& types : all_update_types()) {
    const AdamWRule rule{.beta2 = 0.99, .rounding = Rounding::kStochastic, .seed = 5};
    UpdateMemory whole = drawn(types, 700, 100);
    UpdateMemory cut = whole;
    UpdateMemory in_parts = whole;
    for (int64_t step = 1; step <= 2; ++step) {
      const StepState state = begun(step);
      adamw(whole, state, rule);
      for (int64_t index = 0; index < 5; ++index)
        adamw_on_cpu(cut.span(), rule, state, piece_of_span(cut.span(), index, 5));
      for (const auto& [begin, end] : {std::pair(0, 28), std::pair(28, 412), std::pair(412, 700)}) {
        const UpdateSpan part = part_of_span(in_parts.span(), begin, end - begin);
        adamw_on_cpu(part, rule, state, {.begin = 0, .end = part.numel});
      }
    }
    EXPECT_TRUE(whole == cut) << text_of(types);
    EXPECT_TRUE(whole == in_parts) << text_of(types);
  }
}

// Elements [begin, end) of everything.
UpdateMemory part_of(const UpdateMemory& whole, int64_t begin, int64_t end) {
  UpdateMemory part(whole.types, end - begin, whole.flat_begin + begin);
  const auto copy = [&](const UpdateMemory::Bytes& from, UpdateMemory::Bytes& to) {
    if (from.empty()) return;
    const auto each = static_cast<int64_t>(from.size()) / whole.numel;
    std::copy(from.begin() + begin * each, from.begin() + end * each, to.begin());
  };
  for (const auto array : {&UpdateMemory::gradient, &UpdateMemory::weight,
                           &UpdateMemory::main_weight, &UpdateMemory::first, &UpdateMemory::second})
    copy(whole.*array, part.*array);
  const int64_t block = part.flat_begin / kScaleBlock - whole.flat_begin / kScaleBlock;
  for (const auto scales : {&UpdateMemory::first_scales, &UpdateMemory::second_scales})
    std::copy_n((whole.*scales).begin() + ((whole.*scales).empty() ? 0 : block),
                (part.*scales).size(), (part.*scales).begin());
  return part;
}

TEST(AdamWOnCpu, UpdateOfAShardIsTheShardOfTheUpdate) {
  const AdamWRule rule{.beta2 = 0.99, .rounding = Rounding::kStochastic, .seed = 5};
  for (const UpdateTypes& types : all_update_types()) {
    // Blocks that a shard's end cuts have two scales, so only types without scales are cut there.
    const bool has_scales = is_scaled(types.first) || is_scaled(types.second);
    const std::vector<int64_t> ends = has_scales ? std::vector<int64_t>{0, 128 - 77, 640 - 77, 2000}
                                                 : std::vector<int64_t>{0, 1, 333, 1500, 2000};
    const UpdateMemory whole = after_three_steps(types, 2000, 77, rule);
    for (size_t shard = 0; shard + 1 < ends.size(); ++shard) {
      const int64_t begin = ends[shard];
      const int64_t end = ends[shard + 1];
      const UpdateMemory alone = after_three_steps(types, end - begin, 77 + begin, rule);
      EXPECT_TRUE(alone == part_of(whole, begin, end)) << text_of(types) << ", shard " << shard;
    }
  }
}

TEST(AdamWOnCpu, PositionsAboveFourBillionAreCutLikeOthers) {
  const UpdateTypes types{.weight = DType::kBFloat16, .second = DType::kBFloat16};
  const AdamWRule rule{.rounding = Rounding::kStochastic, .seed = 5};
  const int64_t flat_begin = (int64_t{1} << 32) - 1000;
  const UpdateMemory whole = after_three_steps(types, 2000, flat_begin, rule);
  EXPECT_TRUE(after_three_steps(types, 1900, flat_begin + 100, rule) == part_of(whole, 100, 2000));
}

// --- weights -------------------------------------------------------------------------------------

TEST(AdamWOnCpu, SplitAndSeparateMainWeightsTrainTheSameBits) {
  for (const DType gradient : {DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
    UpdateTypes types{.gradient = gradient, .weight = DType::kBFloat16, .main = MainWeight::kSplit};
    const UpdateMemory split = after_three_steps(types, 3001, 5);
    types.main = MainWeight::kSeparate;
    const UpdateMemory separate = after_three_steps(types, 3001, 5);
    EXPECT_EQ(split.weight, separate.weight);
    EXPECT_EQ(split.first, separate.first);
    EXPECT_EQ(split.second, separate.second);
    for (int64_t i = 0; i < split.numel; ++i)
      ASSERT_EQ(split.main_value(i), separate.main_value(i)) << i;
  }
}

// Gradients of seven bits are the same number in every type.
template <typename Narrow>
void set_gradients(UpdateMemory& memory, int64_t seed) {
  auto* codes = reinterpret_cast<typename Narrow::Code*>(memory.gradient.data());
  for (int64_t i = 0; i < memory.numel; ++i)
    codes[i] = Narrow::nearest(static_cast<float>((i * 37 + seed * 11) % 127 - 63) / 64.0f);
}

TEST(AdamWOnCpu, LoopsWithAndWithoutStagesGiveTheSameBits) {
  for (const MainWeight main : {MainWeight::kSplit, MainWeight::kSeparate})
    for (const DType moments : {DType::kFloat32, DType::kBFloat16}) {
      UpdateTypes types{DType::kFloat16, DType::kBFloat16, main, moments, moments};
      UpdateMemory staged = drawn(types, 3001, 77);
      types.gradient = DType::kBFloat16;
      UpdateMemory direct = drawn(types, 3001, 77);
      for (int64_t step = 1; step <= 3; ++step) {
        set_gradients<Fp16>(staged, step);
        set_gradients<Bf16>(direct, step);
        adamw(staged, begun(step));
        adamw(direct, begun(step));
      }
      EXPECT_EQ(direct.weight, staged.weight) << text_of(types);
      EXPECT_EQ(direct.main_weight, staged.main_weight) << text_of(types);
      EXPECT_EQ(direct.first, staged.first) << text_of(types);
      EXPECT_EQ(direct.second, staged.second) << text_of(types);
    }
}

TEST(AdamWOnCpu, StochasticRoundingKeepsUpdatesThatRoundingToNearestLoses) {
  // A weight of 1 in bf16 has neighbours 2^-8 below and 2^-7 above; a step of 2^-12 is far below.
  constexpr int64_t kNumel = 1 << 16;
  const UpdateTypes types{.weight = DType::kBFloat16};
  for (const Rounding rounding : {Rounding::kNearest, Rounding::kStochastic}) {
    UpdateMemory memory(types, kNumel, 0);
    auto* weights = reinterpret_cast<uint16_t*>(memory.weight.data());
    auto* gradients = reinterpret_cast<float*>(memory.gradient.data());
    std::fill_n(weights, kNumel, uint16_t{0x3F80});
    std::fill_n(gradients, kNumel, 1.0f);
    UpdateSpan span = memory.span();
    span.weight_decay = 0;
    span.rate_scale = 1;
    StepState state{.learning_rate = 0x1p-12};
    begin_step(state, {});
    adamw_on_cpu(span, {.rounding = rounding, .seed = 1}, state, {0, kNumel});
    double mean = 0;
    for (int64_t i = 0; i < kNumel; ++i) mean += 1 - memory.main_value(i);
    mean /= kNumel;
    if (rounding == Rounding::kNearest) {
      EXPECT_EQ(mean, 0.0);
    } else {
      // One draw: 2^-8 with probability 1/16, so a standard deviation of 2^-8 / 4; five of them.
      EXPECT_NEAR(mean, 0x1p-12, 5 * 0x1p-10 / std::sqrt(kNumel));
    }
  }
}

TEST(AdamWOnCpu, RandomNumbersDependOnSeedAndGroup) {
  const UpdateTypes types{.weight = DType::kBFloat16};
  const AdamWRule rule{.rounding = Rounding::kStochastic, .seed = 5};
  AdamWRule reseeded = rule;
  reseeded.seed = 6;
  const UpdateMemory base = after_three_steps(types, 500, 0, rule);
  EXPECT_TRUE(after_three_steps(types, 500, 0, rule) == base);
  EXPECT_NE(after_three_steps(types, 500, 0, reseeded).weight, base.weight);
  UpdateMemory memory = drawn(types, 500, 0);
  UpdateMemory other = memory;
  adamw(memory, begun(1), rule);
  UpdateSpan span = other.span();
  ++span.group;
  adamw_on_cpu(span, rule, begun(1), {0, 500});
  EXPECT_NE(memory.weight, other.weight);
}

// --- SGD -----------------------------------------------------------------------------------------

TEST(SgdOnCpu, FollowsTheFormulasInEveryCombinationOfTypes) {
  for (const UpdateTypes& types : all_update_types()) {
    if (types.second != DType::kFloat32) continue;
    for (const SgdRule& rule :
         {SgdRule{}, SgdRule{.momentum = 0.9}, SgdRule{.momentum = 0.9, .nesterov = true}}) {
      SCOPED_TRACE(text_of(types));
      UpdateMemory memory = drawn(types, 301, 77);
      for (uint32_t step = 1; step <= 3; ++step) {
        memory.draw_gradients(step + 10);
        const StepState state = begun(step, 16.0, 1.0);
        const UpdateMemory before = memory;
        UpdateSpan span = memory.span();
        if (rule.momentum == 0) span.first = {};
        sgd_on_cpu(span, rule, state, {0, span.numel});
        for (int64_t i = 0; i < memory.numel; ++i) {
          const double g = testing::decoded(types.gradient, before.gradient.data(), i) *
                               static_cast<double>(state.gradient_factor) +
                           0.125 * before.main_value(i);
          const double buffer = rule.momentum == 0 ? 0 : before.first_value(i) * 0.9 + g;
          const double nesterov = rule.nesterov ? g + 0.9 * buffer : buffer;
          const double direction = rule.momentum == 0 ? g : nesterov;
          const double terms =
              std::abs(before.main_value(i)) + std::abs(before.first_value(i)) + 2 * std::abs(g);
          expect_close(memory, i,
                       {.weight = before.main_value(i) - kRate * 0.5 * direction,
                        .first = buffer,
                        .second = before.second_value(i),
                        .weight_terms = std::abs(before.main_value(i)) + kRate * terms,
                        .first_terms = terms});
          if (HasFatalFailure()) return;
        }
      }
    }
  }
}

TEST(SgdOnCpu, PiecesGiveTheSameBitsAndSkippedStepsChangeNothing) {
  const SgdRule rule{.momentum = 0.9, .rounding = Rounding::kStochastic, .seed = 8};
  for (const UpdateTypes& types : all_update_types()) {
    if (types.second != DType::kFloat32) continue;
    UpdateMemory whole = drawn(types, 3001, 77);
    UpdateMemory cut = whole;
    StepState state = begun(1);
    sgd_on_cpu(whole.span(), rule, state, {0, 3001});
    for (int64_t index = 0; index < 5; ++index)
      sgd_on_cpu(cut.span(), rule, state, piece_of_span(cut.span(), index, 5));
    EXPECT_TRUE(whole == cut) << text_of(types);
    state.skips = 1;
    sgd_on_cpu(whole.span(), rule, state, {0, 3001});
    EXPECT_TRUE(whole == cut) << text_of(types);
  }
}

TEST(UpdateOnDevice, SaysThatThisBuildHasNone) {
  if (has_device_updates()) GTEST_SKIP() << "this build has them";
  EXPECT_THAT([] { adamw_on_device({}, {}, nullptr, nullptr); },
              ThrowsMessage<Error>(HasSubstr("build with FSDP_CUDA=ON")));
}

}  // namespace
}  // namespace fsdp::update_on_cpu_test
