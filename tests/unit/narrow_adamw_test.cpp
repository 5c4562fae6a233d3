// AdamW on whole spans against its definition: one element at a time, with the functions of
// adamw_math.h, moment_code.h and narrow_float.h, in every combination of types and for numbers of
// every class.
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "fsdp/base/narrow_float.h"
#include "fsdp/optim/adamw_math.h"
#include "fsdp/optim/begin_step.h"
#include "fsdp/optim/counter_random.h"
#include "fsdp/optim/default_nan.h"
#include "fsdp/optim/moment_code.h"
#include "fsdp/optim/split_weight.h"
#include "fsdp/optim/update_on_cpu.h"
#include "support/update_case.h"

namespace fsdp {
namespace {

using testing::text_of;
using testing::UpdateMemory;
using testing::UpdateTypes;

// Calls body with the type as an object.
template <typename Body>
auto with_type(DType dtype, const Body& body) {
  if (dtype == DType::kFloat32) return body(Fp32{});
  if (dtype == DType::kBFloat16) return body(Bf16{});
  if (dtype == DType::kFloat16) return body(Fp16{});
  if (dtype == DType::kFloat8E4M3) return body(Fp8E4M3{});
  return body(Fp8E5M2{});
}

template <typename Word>
Word& word_of(UpdateMemory::Bytes& bytes, int64_t i) {
  return reinterpret_cast<Word*>(bytes.data())[i];
}

float widened(DType dtype, UpdateMemory::Bytes& bytes, int64_t i) {
  return with_type(dtype, [&]<typename Narrow>(Narrow) {
    return Narrow::widened(word_of<typename Narrow::Code>(bytes, i));
  });
}

// --- one element at a time -----------------------------------------------------------------------

float main_weight(UpdateMemory& memory, int64_t i) {
  if (memory.types.main == MainWeight::kSeparate) return word_of<float>(memory.main_weight, i);
  if (memory.types.main == MainWeight::kSplit)
    return join_weight({.upper = word_of<uint16_t>(memory.weight, i),
                        .remainder = word_of<int16_t>(memory.main_weight, i)});
  return widened(memory.types.weight, memory.weight, i);
}

void set_weight(UpdateMemory& memory, int64_t i, float value, Rounding rounding, uint32_t random) {
  const UpdateTypes& types = memory.types;
  if (types.main == MainWeight::kSplit) {
    const SplitWeight split = split_weight(value);
    word_of<uint16_t>(memory.weight, i) = split.upper;
    word_of<int16_t>(memory.main_weight, i) = split.remainder;
    return;
  }
  const bool is_separate = types.main == MainWeight::kSeparate;
  if (is_separate) word_of<float>(memory.main_weight, i) = value;
  with_type(types.weight, [&]<typename Narrow>(Narrow) {
    auto& code = word_of<typename Narrow::Code>(memory.weight, i);
    code = Narrow::nearest(value);
    if constexpr (!std::is_same_v<Narrow, Fp32>)
      if (!is_separate && rounding == Rounding::kStochastic)
        code = Narrow::stochastic(value, random);
    if constexpr (std::is_same_v<Narrow, Bf16>)
      if (is_separate) code = rounded_away(value);
  });
}

// Elements [begin, end) of a block of scales.
struct Block {
  int64_t begin, end;
  size_t scale;
};

// `kept` are the numbers to store: second moments' roots where the type is scaled.
void set_moments(DType dtype, UpdateMemory::Bytes& bytes, std::vector<float>& scales,
                 const Block& block, const std::vector<float>& kept,
                 const std::vector<uint32_t>* random) {
  uint32_t largest = 0;
  for (const float value : kept) largest = std::max(largest, magnitude_bits(value));
  with_type(dtype, [&]<typename Narrow>(Narrow) {
    for (int64_t i = block.begin; i < block.end; ++i) {
      const auto k = static_cast<size_t>(i - block.begin);
      auto& code = word_of<typename Narrow::Code>(bytes, i);
      if constexpr (std::is_same_v<Narrow, Fp32>) {
        code = kept[k];
      } else if constexpr (std::is_same_v<Narrow, Bf16>) {
        code = random ? Narrow::stochastic(kept[k], (*random)[k]) : Narrow::nearest(kept[k]);
      } else {
        const float scale = scales[block.scale] = block_scale<Narrow>(largest);
        const float scaled = kept[k] * inverse_scale(scale);
        code = random ? root_code<Narrow>(scaled, (*random)[k]) : Narrow::nearest(scaled);
      }
    }
  });
}

void update_block(UpdateMemory& memory, const AdamWFactors& by, const AdamWRule& rule, int64_t step,
                  const Block& block) {
  const UpdateTypes& types = memory.types;
  const auto scale = [&](DType dtype, const std::vector<float>& scales) {
    return is_scaled(dtype) ? scales[block.scale] : 1.0f;
  };
  const float first_scale = scale(types.first, memory.first_scales);
  const float second_scale = scale(types.second, memory.second_scales);
  std::vector<float> firsts, seconds;
  std::vector<uint32_t> random;
  for (int64_t i = block.begin; i < block.end; ++i) {
    const int64_t position = memory.flat_begin + i;
    const auto bits = [&](RandomPurpose purpose) {
      const RandomKey key = random_key(rule.seed, step, memory.span().group, purpose, position);
      return random_bits(key, static_cast<uint32_t>(position));
    };
    float weight = main_weight(memory, i);
    float first = widened(types.first, memory.first, i) * first_scale;
    float second = widened(types.second, memory.second, i) * second_scale;
    if (is_scaled(types.second)) second *= second;
    adamw_element(by, widened(types.gradient, memory.gradient, i), weight, first, second);
    set_weight(memory, i, weight, rule.rounding, bits(RandomPurpose::kWeight));
    firsts.push_back(first);
    seconds.push_back(is_scaled(types.second) ? std::sqrt(second) : second);
    random.push_back(bits(RandomPurpose::kSecondMoment));
  }
  set_moments(types.first, memory.first, memory.first_scales, block, firsts, nullptr);
  set_moments(types.second, memory.second, memory.second_scales, block, seconds, &random);
}

[[gnu::noinline]] void update_by_elements(UpdateMemory& memory, const AdamWRule& rule,
                                          const StepState& state) {
  const UpdateSpan span = memory.span();
  const AdamWFactors by = adamw_factors(rule, state, span.rate_scale, span.weight_decay);
  Block block{.begin = 0, .end = 0, .scale = 0};
  for (; block.begin < memory.numel; block.begin = block.end, ++block.scale) {
    const int64_t past = (memory.flat_begin + block.begin) % kScaleBlock;
    block.end = std::min(block.begin + kScaleBlock - past, memory.numel);
    update_block(memory, by, rule, state.step, block);
  }
}

// --- comparisons ---------------------------------------------------------------------------------

// Which NaN a sum of two becomes, machines do not agree on; aarch64 has been told.
#if defined(__aarch64__)
constexpr bool kHasOneNan = true;
void expect_by_elements(UpdateMemory& memory, const AdamWRule& rule, const StepState& state) {
  const DefaultNan usual;
  update_by_elements(memory, rule, state);
}
#else
constexpr bool kHasOneNan = false;
void expect_by_elements(UpdateMemory& memory, const AdamWRule& rule, const StepState& state) {
  update_by_elements(memory, rule, state);
}
#endif

void expect_same(DType dtype, const UpdateMemory::Bytes& found, const UpdateMemory::Bytes& expected,
                 const char* what) {
  if (found == expected) return;
  const auto bytes = static_cast<size_t>(element_bytes(dtype));
  for (size_t i = 0; i < found.size() / bytes; ++i) {
    if (std::memcmp(found.data() + i * bytes, expected.data() + i * bytes, bytes) == 0) continue;
    const double value = testing::decoded(dtype, found.data(), static_cast<int64_t>(i));
    const double wanted = testing::decoded(dtype, expected.data(), static_cast<int64_t>(i));
    if (!kHasOneNan && std::isnan(value) && std::isnan(wanted)) continue;
    ADD_FAILURE() << what << " " << i << " is " << value << " instead of " << wanted;
    return;
  }
}

StepState begun(int64_t steps) {
  StepState state{.learning_rate = 0.01};
  for (int64_t step = 0; step < steps; ++step) begin_step(state, {});
  return state;
}

void expect_defined(const UpdateMemory& before, const AdamWRule& rule, int64_t step) {
  SCOPED_TRACE(text_of(before.types));
  UpdateMemory found = before;
  UpdateMemory expected = before;
  const StepState state = begun(step);
  const UpdateSpan span = found.span();
  adamw_on_cpu(span, rule, state, {.begin = 0, .end = found.numel});
  expect_by_elements(expected, rule, state);
  const UpdateTypes& types = before.types;
  const DType main =
      types.main == MainWeight::kSplit ? DType::kBFloat16 : DType::kFloat32;  // sixteen bits
  EXPECT_EQ(found.first_scales, expected.first_scales);
  EXPECT_EQ(found.second_scales, expected.second_scales);
  expect_same(types.weight, found.weight, expected.weight, "weight");
  expect_same(main, found.main_weight, expected.main_weight, "main weight");
  expect_same(types.first, found.first, expected.first, "first moment");
  expect_same(types.second, found.second, expected.second, "second moment");
}

// --- numbers -------------------------------------------------------------------------------------

void set_gradient(UpdateMemory& memory, int64_t i, float value) {
  with_type(memory.types.gradient, [&]<typename Narrow>(Narrow) {
    word_of<typename Narrow::Code>(memory.gradient, i) = Narrow::nearest(value);
  });
}

// What a block of the span is like.
enum class Kind : uint8_t {
  kUsual,        // sizes that differ by orders of magnitude
  kZero,         // nothing but zeros of both signs
  kWide,         // from the smallest numbers to large ones: subnormals of every type
  kSpecial,      // Inf, NaN, powers of two and limits among usual ones
  kAnyCodes,     // moments and weights of random bits, scales of random exponents
  kAnyGradients  // gradients of random bits
};
constexpr int kNumKinds = 6;

UpdateMemory memory_of_all_kinds(const UpdateTypes& types, int64_t numel, int64_t flat_begin) {
  constexpr float kInf = std::numeric_limits<float>::infinity();
  const float specials[] = {kInf,      -kInf,   NAN,    0.0f,    -0.0f,   1.0f,
                            -0x1p-30f, 0x1p30f, 1e-45f, -1e-38f, 3.4e38f, 65504.f,
                            65520.0f,  1e19f,   448.0f, -464.0f, 0x1p-14f};
  UpdateMemory memory(types, numel, flat_begin);
  memory.draw_weights(1);
  memory.draw_gradients(2);
  const StepState state = begun(1);
  adamw_on_cpu(memory.span(), {}, state, {.begin = 0, .end = numel});
  memory.draw_gradients(3);
  std::mt19937 random(static_cast<uint32_t>(numel));
  const auto randomize = [&](UpdateMemory::Bytes& bytes, int64_t i) {
    const auto each = static_cast<int64_t>(bytes.size()) / numel;
    for (int64_t k = 0; k < each; ++k)
      bytes[static_cast<size_t>(i * each + k)] = std::byte(random());
  };
  const int64_t first_block = flat_begin / kScaleBlock;
  for (int64_t i = 0; i < numel; ++i) {
    const int64_t block = (flat_begin + i) / kScaleBlock - first_block;
    const Kind kind = static_cast<Kind>(block % kNumKinds);
    if (kind == Kind::kZero) {
      set_gradient(memory, i, i % 3 == 0 ? -0.0f : 0.0f);
      for (UpdateMemory::Bytes* bytes : {&memory.first, &memory.second}) {
        const auto each = static_cast<int64_t>(bytes->size()) / numel;
        std::fill_n(bytes->begin() + i * each, each, std::byte{0});
      }
    } else if (kind == Kind::kWide) {
      const int exponent = static_cast<int>(random() % 60) - 40;
      set_gradient(memory, i, std::ldexp(static_cast<float>(random() % 1000) - 500.0f, exponent));
    } else if (kind == Kind::kSpecial && random() % 8 == 0) {
      set_gradient(memory, i, specials[random() % std::size(specials)]);
    } else if (kind == Kind::kAnyCodes) {
      for (UpdateMemory::Bytes* bytes :
           {&memory.first, &memory.second, &memory.weight, &memory.main_weight})
        randomize(*bytes, i);
      for (std::vector<float>* scales : {&memory.first_scales, &memory.second_scales})
        if (!scales->empty())
          (*scales)[static_cast<size_t>(block)] =
              std::ldexp(1.0f, static_cast<int>(block * 37 % 246) - 126);
    } else if (kind == Kind::kAnyGradients) {
      randomize(memory.gradient, i);
    }
  }
  return memory;
}

// --- tests ---------------------------------------------------------------------------------------

TEST(NarrowAdamW, EveryCombinationOfTypesIsUpdatedAsOneElementIs) {
  for (const UpdateTypes& types : testing::all_update_types()) {
    const UpdateMemory memory = memory_of_all_kinds(types, 7 * kScaleBlock + 60, 77);
    expect_defined(memory, {.rounding = Rounding::kStochastic, .seed = 5}, 4);
    if (types.main == MainWeight::kIsWeight && types.weight != DType::kFloat32)
      expect_defined(memory, {.rounding = Rounding::kNearest, .seed = 5}, 4);
  }
}

std::vector<UpdateTypes> usual_types() {
  std::vector<UpdateTypes> chosen;
  for (const DType moments :
       {DType::kFloat32, DType::kBFloat16, DType::kFloat16, DType::kFloat8E4M3, DType::kFloat8E5M2})
    for (const MainWeight main : {MainWeight::kSplit, MainWeight::kIsWeight})
      chosen.push_back({DType::kBFloat16, DType::kBFloat16, main, moments, moments});
  return chosen;
}

TEST(NarrowAdamW, BlocksMayBeCutAtBothEnds) {
  const AdamWRule rule{.rounding = Rounding::kStochastic, .seed = 9};
  for (const UpdateTypes& types : usual_types())
    for (const int64_t flat_begin : {0, 1, 63, 127, 128, 1000})
      for (const int64_t numel : {1, 64, 127, 128, 129, 255, 256, 257, 383, 700})
        expect_defined(memory_of_all_kinds(types, numel, flat_begin), rule, 2);
}

// Many blocks of every kind: other scales, other neighbours, other numbers beside Inf and NaN.
TEST(NarrowAdamW, ManyBlocksAreUpdatedAsOneElementIs) {
  const AdamWRule rule{.rounding = Rounding::kStochastic, .seed = 3};
  for (const UpdateTypes& types : usual_types())
    expect_defined(memory_of_all_kinds(types, 600 * kScaleBlock + 5, 0), rule, 3);
}

TEST(NarrowAdamW, PositionsAboveFourBillionHaveTheirOwnRandomBits) {
  const AdamWRule rule{.rounding = Rounding::kStochastic, .seed = 3};
  const int64_t flat_begin = (int64_t{1} << 32) - 300;
  for (const UpdateTypes& types : usual_types())
    expect_defined(memory_of_all_kinds(types, 600, flat_begin), rule, 3);
}

TEST(NarrowAdamW, FactorsOfAnySizeAreUpdatedAsOneElementIs) {
  for (const UpdateTypes& types : usual_types()) {
    const UpdateMemory memory = memory_of_all_kinds(types, 7 * kScaleBlock, 0);
    for (const AdamWRule& rule :
         {AdamWRule{.beta1 = 0.0}, AdamWRule{.beta2 = 0.0}, AdamWRule{.eps = 0.0},
          AdamWRule{.beta1 = 0.5, .beta2 = 0.5, .eps = 1.0}, AdamWRule{.eps = 1e-38}})
      expect_defined(memory, rule, 2);
  }
}

}  // namespace
}  // namespace fsdp
