// What the lanes of a warp do with an update's arrays: load, widen, round, store. A warp works on
// one block of scales at a time, four neighbours per lane, and shares nothing with others.
#pragma once

#include <cmath>
#include <cstring>
#include <type_traits>

#include "fsdp/base/narrow_vector.cuh"
#include "fsdp/optim/counter_random.h"
#include "fsdp/optim/moment_code.h"
#include "fsdp/optim/split_weight.h"
#include "fsdp/optim/update_rules.h"
#include "fsdp/optim/update_span.h"

namespace fsdp {

inline constexpr int kWarp = 32;
static_assert(kVector * kWarp == kScaleBlock);
inline constexpr unsigned kAllLanes = 0xFFFFFFFFu;

// Whether all lanes of a warp have all their numbers, aligned as vectors in every array.
enum class Blocks : uint8_t { kWhole, kCut };

template <Blocks kBlocks>
struct Lane {
  int64_t begin;     // of this lane's first element in the span; may lie before it
  int64_t position;  // of the same, in the group's whole buffer
  int64_t scale;     // index of the block's scale
  int64_t numel;     // of the span

  __device__ bool has(int k) const {
    return kBlocks == Blocks::kWhole || (begin + k >= 0 && begin + k < numel);
  }
};

// The keys of a step and a group. They change every 2^32 positions, so those of a span's begin are
// kept.
class RandomKeys {
 public:
  __device__ RandomKeys(uint64_t seed, int64_t step, const UpdateSpan& span)
      : seed_(seed),
        step_(step),
        group_(span.group),
        high_(span.flat_begin >> 32),
        for_weight_(made(RandomPurpose::kWeight, span.flat_begin)),
        for_second_(made(RandomPurpose::kSecondMoment, span.flat_begin)) {}

  __device__ RandomKey at(RandomPurpose purpose, int64_t position) const {
    if (position >> 32 != high_) return made(purpose, position);
    return purpose == RandomPurpose::kWeight ? for_weight_ : for_second_;
  }

 private:
  __device__ RandomKey made(RandomPurpose purpose, int64_t position) const {
    return random_key(seed_, step_, group_, purpose, position);
  }

  uint64_t seed_;
  int64_t step_;
  uint64_t group_;
  int64_t high_;
  RandomKey for_weight_;
  RandomKey for_second_;
};

// Neighbours share their bits in pairs, and a lane's first one is even.
template <typename Lane>
__device__ uint32_t random_of(RandomKey key, const Lane& lane, int k) {
  const uint32_t pair = random_pair(key, static_cast<uint32_t>(lane.position) / 2 + k / 2);
  return k % 2 != 0 ? pair >> 16 : pair & 0xFFFFu;
}

// --- arrays --------------------------------------------------------------------------------------

template <typename Word>
__device__ Vector<Word> load(const void* values, const Lane<Blocks::kWhole>& lane) {
  return *reinterpret_cast<const Vector<Word>*>(static_cast<const Word*>(values) + lane.begin);
}
template <typename Word>
__device__ Vector<Word> load(const void* values, const Lane<Blocks::kCut>& lane) {
  return vector_of<Word>([&](int k) {
    return lane.has(k) ? static_cast<const Word*>(values)[lane.begin + k] : Word{};
  });
}

template <typename Word>
__device__ void store(void* values, const Lane<Blocks::kWhole>& lane, const Vector<Word>& vector) {
  *reinterpret_cast<Vector<Word>*>(static_cast<Word*>(values) + lane.begin) = vector;
}
template <typename Word>
__device__ void store(void* values, const Lane<Blocks::kCut>& lane, const Vector<Word>& vector) {
#pragma unroll
  for (int k = 0; k < kVector; ++k)
    if (lane.has(k)) static_cast<Word*>(values)[lane.begin + k] = vector.of[k];
}

// Numbers as they lie in memory. All of a lane's are loaded before the first is looked at: so many
// loads are in flight at once.
struct Raw {
  Vector<uint32_t> words;  // the first ones, as many as the type needs

  template <typename Word>
  __device__ Vector<Word> as() const {
    Vector<Word> vector;
    memcpy(&vector, &words, sizeof(vector));
    return vector;
  }
};

template <typename Word, typename Lane>
__device__ Raw load_words(const void* values, const Lane& lane) {
  const Vector<Word> vector = load<Word>(values, lane);
  Raw raw;
  memcpy(&raw.words, &vector, sizeof(vector));
  return raw;
}

template <typename Lane>
__device__ Raw load_raw(DType dtype, const void* values, const Lane& lane) {
  if (dtype == DType::kFloat32) return load_words<float>(values, lane);
  if (dtype == DType::kFloat8E4M3 || dtype == DType::kFloat8E5M2)
    return load_words<uint8_t>(values, lane);
  return load_words<uint16_t>(values, lane);
}

__device__ inline Numbers widened(DType dtype, const Raw& raw) {
  if (dtype == DType::kBFloat16) return widened<Bf16>(raw.as<uint16_t>());
  if (dtype == DType::kFloat16) return widened<Fp16>(raw.as<uint16_t>());
  if (dtype == DType::kFloat8E4M3) return widened<Fp8E4M3>(raw.as<uint8_t>());
  if (dtype == DType::kFloat8E5M2) return widened<Fp8E5M2>(raw.as<uint8_t>());
  return widened<Fp32>(raw.as<float>());
}

template <typename Lane>
__device__ void store_wide(void* to, const Lane& lane, const Numbers& values) {
  store(to, lane, vector_of<float>([&](int k) { return values.of[k]; }));
}

// --- weights -------------------------------------------------------------------------------------

struct RawWeight {
  Raw weight;
  Raw main;
};

template <typename Lane>
__device__ RawWeight load_weight(const UpdateSpan& span, const Lane& lane) {
  RawWeight raw;
  if (span.main != MainWeight::kSeparate)
    raw.weight = load_raw(span.weight_dtype, span.weight, lane);
  if (span.main == MainWeight::kSeparate) raw.main = load_words<float>(span.main_weight, lane);
  if (span.main == MainWeight::kSplit) raw.main = load_words<int16_t>(span.main_weight, lane);
  return raw;
}

__device__ inline Numbers main_weight(const UpdateSpan& span, const RawWeight& raw) {
  if (span.main == MainWeight::kSeparate) return widened<Fp32>(raw.main.as<float>());
  if (span.main != MainWeight::kSplit) return widened(span.weight_dtype, raw.weight);
  const auto upper = raw.weight.as<uint16_t>();
  const auto remainder = raw.main.as<int16_t>();
  return each(
      [&](int k) { return join_weight({.upper = upper.of[k], .remainder = remainder.of[k]}); });
}

struct SplitVector {
  Vector<uint16_t> upper;
  Vector<int16_t> remainder;
};

// The upper halves of two numbers' bits, side by side; and the lower ones.
__device__ inline uint32_t upper_halves(uint32_t first, uint32_t second) {
  return __byte_perm(first, second, 0x7632);
}
__device__ inline uint32_t lower_halves(uint32_t first, uint32_t second) {
  return __byte_perm(first, second, 0x5410);
}

// split_weight of four; without NaN, which is split in its usual form alone, bytes are only moved.
__device__ inline SplitVector split_vector(const Numbers& values) {
  const float* v = values.of;
  if (has_nan(values))
    return {.upper = vector_of<uint16_t>([&](int k) { return split_weight(v[k]).upper; }),
            .remainder = vector_of<int16_t>([&](int k) { return split_weight(v[k]).remainder; })};
  const auto rounded = [&](int k) {
    return upper_halves(__float_as_uint(v[k]) + 0x8000u, __float_as_uint(v[k + 1]) + 0x8000u);
  };
  const auto rest = [&](int k) {
    return lower_halves(__float_as_uint(v[k]), __float_as_uint(v[k + 1]));
  };
  return {.upper = narrow::as_vector<uint16_t>(rounded(0), rounded(2)),
          .remainder = narrow::as_vector<int16_t>(rest(0), rest(2))};
}

template <typename Narrow, typename Lane>
__device__ Vector<uint16_t> stochastic(const Numbers& values, const Lane& lane, RandomKey key) {
  if (std::is_same_v<Narrow, Bf16> && !has_nan(values)) {
    const auto rounded = [&](int k) {
      return upper_halves(__float_as_uint(values.of[k]) + random_of(key, lane, k),
                          __float_as_uint(values.of[k + 1]) + random_of(key, lane, k + 1));
    };
    return narrow::as_vector<uint16_t>(rounded(0), rounded(2));
  }
  return vector_of<uint16_t>(
      [&](int k) { return Narrow::stochastic(values.of[k], random_of(key, lane, k)); });
}

template <typename Lane>
__device__ void store_weight(const UpdateSpan& span, const Lane& lane, const Numbers& values,
                             Rounding rounding, const RandomKeys& keys) {
  if (span.main == MainWeight::kSplit) {
    const SplitVector split = split_vector(values);
    store(span.weight, lane, split.upper);
    store(span.main_weight, lane, split.remainder);
    return;
  }
  if (span.main == MainWeight::kSeparate) store_wide(span.main_weight, lane, values);
  const bool is_bf16 = span.weight_dtype == DType::kBFloat16;
  if (span.weight_dtype == DType::kFloat32) {
    store_wide(span.weight, lane, values);
  } else if (span.main == MainWeight::kIsWeight && rounding == Rounding::kStochastic) {
    const RandomKey key = keys.at(RandomPurpose::kWeight, lane.position);
    if (is_bf16) {
      store(span.weight, lane, stochastic<Bf16>(values, lane, key));
    } else {
      store(span.weight, lane, stochastic<Fp16>(values, lane, key));
    }
  } else if (span.main == MainWeight::kIsWeight && is_bf16) {
    store(span.weight, lane, nearest<Bf16>(values));
  } else if (is_bf16) {
    store(span.weight, lane, split_vector(values).upper);
  } else {
    store(span.weight, lane, nearest<Fp16>(values));
  }
}

// --- moments -------------------------------------------------------------------------------------

template <typename Lane>
__device__ float load_scale(const Moment& moment, const Lane& lane) {
  return is_scaled(moment.dtype) ? moment.scales[lane.scale] : 1.0f;
}

__device__ inline Numbers first_moment(const Moment& moment, const Raw& raw, float scale) {
  const Numbers values = widened(moment.dtype, raw);
  return each([&](int k) { return values.of[k] * scale; });
}

__device__ inline Numbers second_moment(const Moment& moment, const Raw& raw, float scale) {
  const Numbers values = first_moment(moment, raw, scale);
  if (!is_scaled(moment.dtype)) return values;
  return each([&](int k) { return values.of[k] * values.of[k]; });
}

// Of all lanes that have an element; they hold one block's numbers together.
struct SharedScale {
  float inverse;
  bool is_of_all;  // no number is NaN or Inf, so all are in range
};

// Sets the block's scale.
template <typename Narrow, typename Lane>
__device__ SharedScale share_scale(const Numbers& values, const Moment& moment, const Lane& lane) {
  constexpr uint32_t kInf = 0x7F800000u;
  const auto largest_of = [&](const auto& magnitude) {
    uint32_t largest = 0;
#pragma unroll
    for (int k = 0; k < kVector; ++k)
      if (lane.has(k)) largest = max(largest, magnitude(values.of[k]));
    return __reduce_max_sync(kAllLanes, largest);
  };
  uint32_t largest = largest_of([](float value) { return __float_as_uint(value) & 0x7FFFFFFFu; });
  const bool is_of_all = largest < kInf;
  if (!is_of_all) largest = largest_of([](float value) { return magnitude_bits(value); });
  const float scale = block_scale<Narrow>(largest);
  if (threadIdx.x % kWarp == 0) moment.scales[lane.scale] = scale;
  return {.inverse = inverse_scale(scale), .is_of_all = is_of_all};
}

template <typename Narrow, typename Lane>
__device__ void store_scaled(const Numbers& values, const Moment& moment, const Lane& lane) {
  const SharedScale scale = share_scale<Narrow>(values, moment, lane);
  const Numbers scaled = each([&](int k) { return values.of[k] * scale.inverse; });
  store(moment.values, lane,
        scale.is_of_all ? nearest_in_range<Narrow>(scaled) : nearest<Narrow>(scaled));
}

template <typename Narrow, typename Lane>
__device__ void store_roots(const Numbers& roots, const Moment& moment, const Lane& lane,
                            RandomKey key) {
  const float inverse = share_scale<Narrow>(roots, moment, lane).inverse;
  store(moment.values, lane, vector_of<typename Narrow::Code>([&](int k) {
          return root_code<Narrow>(roots.of[k] * inverse, random_of(key, lane, k));
        }));
}

template <typename Lane>
__device__ void store_first(const Numbers& values, const Moment& moment, const Lane& lane) {
  if (moment.dtype == DType::kBFloat16) {
    store(moment.values, lane, nearest<Bf16>(values));
  } else if (moment.dtype == DType::kFloat16) {
    store_scaled<Fp16>(values, moment, lane);
  } else if (moment.dtype == DType::kFloat8E4M3) {
    store_scaled<Fp8E4M3>(values, moment, lane);
  } else if (moment.dtype == DType::kFloat8E5M2) {
    store_scaled<Fp8E5M2>(values, moment, lane);
  } else {
    store_wide(moment.values, lane, values);
  }
}

template <typename Lane>
__device__ void store_second(const Numbers& values, const Numbers& roots, const Moment& moment,
                             const Lane& lane, const RandomKeys& keys) {
  const RandomKey key = keys.at(RandomPurpose::kSecondMoment, lane.position);
  if (moment.dtype == DType::kBFloat16) {
    store(moment.values, lane, stochastic<Bf16>(values, lane, key));
  } else if (moment.dtype == DType::kFloat16) {
    store_roots<Fp16>(roots, moment, lane, key);
  } else if (moment.dtype == DType::kFloat8E4M3) {
    store_roots<Fp8E4M3>(roots, moment, lane, key);
  } else if (moment.dtype == DType::kFloat8E5M2) {
    store_roots<Fp8E5M2>(roots, moment, lane, key);
  } else {
    store_wide(moment.values, lane, values);
  }
}

}  // namespace fsdp
