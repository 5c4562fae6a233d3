// The work of a warp's lanes on an update's arrays: load, widen, round, store. A warp works on one
// block of scales at a time, four neighbours per lane, and shares nothing with other warps.
#pragma once

#include <cmath>
#include <cstring>
#include <type_traits>

#include "fsdp/base/narrow_vector.cuh"
#include "fsdp/optim/kernels/moments.h"
#include "fsdp/optim/kernels/split_weight.h"
#include "fsdp/optim/kernels/update_math.h"
#include "fsdp/optim/kernels/update_span.h"

namespace fsdp {

inline constexpr int kWarp = 32;
static_assert(kVector * kWarp == kScaleBlock);
inline constexpr unsigned kAllLanes = 0xFFFFFFFFu;

// Whether all lanes of a warp have all their numbers, aligned as vectors in every array.
enum class Blocks : uint8_t { kWhole, kCut };

template <Blocks kBlocks>
struct Lane {
  int64_t begin;      // of this lane's first element in the span; may lie before it
  uint32_t position;  // of the same in the group's whole buffer, the lower half
  int64_t numel;      // of the span

  __device__ bool has(int k) const {
    return kBlocks == Blocks::kWhole || (begin + k >= 0 && begin + k < numel);
  }
};

// The random bits of a lane's elements. Neighbours share bits in pairs, and a lane has two pairs,
// the first of which is even, so the numbers that random_pair first multiplies differ only in the
// last bit.
class LaneRandom {
 public:
  template <typename Lane>
  __device__ LaneRandom(RandomKey key, const Lane& lane)
      : pairs_{random_pair(key, lane.position / 2), random_pair(key, lane.position / 2 ^ 1u)} {}

  __device__ uint32_t of(int k) const {
    return k % 2 != 0 ? pairs_[k / 2] >> 16 : pairs_[k / 2] & 0xFFFFu;
  }

 private:
  uint32_t pairs_[2];
};

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
    if (lane.has(k)) static_cast<Word*>(values)[lane.begin + k] = vector[k];
}

// Numbers as in memory. A lane loads all of them before it uses the first, so that many loads are
// in flight at once.
struct Raw {
  uint32_t words[kVector];  // the first ones, as many as the type needs

  template <typename Word>
  __device__ Vector<Word> as() const {
    Vector<Word> vector;
    memcpy(&vector, words, sizeof(vector));
    return vector;
  }
};

template <typename Word, typename Lane>
__device__ Raw load_words(const void* values, const Lane& lane) {
  const Vector<Word> vector = load<Word>(values, lane);
  Raw raw;
  memcpy(raw.words, &vector, sizeof(vector));
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

// join_weight of two neighbours in packed form.
__device__ inline float joined_low(uint32_t uppers, uint32_t remainders) {
  return join_weight({.upper = static_cast<uint16_t>(uppers),
                      .remainder = static_cast<int16_t>(static_cast<uint16_t>(remainders))});
}
__device__ inline float joined_high(uint32_t uppers, uint32_t remainders) {
  const int32_t remainder = static_cast<int32_t>(remainders) >> 16;
  return __uint_as_float((uppers & 0xFFFF0000u) + static_cast<uint32_t>(remainder));
}

__device__ inline Numbers main_weight(const UpdateSpan& span, const RawWeight& raw) {
  if (span.main == MainWeight::kSeparate) return widened<Fp32>(raw.main.as<float>());
  if (span.main != MainWeight::kSplit) return widened(span.weight_dtype, raw.weight);
  const uint32_t* uppers = raw.weight.words;
  const uint32_t* remainders = raw.main.words;
  return {joined_low(uppers[0], remainders[0]), joined_high(uppers[0], remainders[0]),
          joined_low(uppers[1], remainders[1]), joined_high(uppers[1], remainders[1])};
}

// Bits of numbers computed on the device, with NaN in the form of bits_to_split: a device's
// arithmetic makes only one NaN, which as an integer is above all numbers.
__device__ inline uint32_t computed_bits(float value) {
  return static_cast<uint32_t>(min(__float_as_int(value), 0x7FC00000));
}

// The upper halves of two numbers' bits, side by side; and the lower ones.
__device__ inline uint32_t upper_halves(uint32_t first, uint32_t second) {
  return __byte_perm(first, second, 0x7632);
}
__device__ inline uint32_t lower_halves(uint32_t first, uint32_t second) {
  return __byte_perm(first, second, 0x5410);
}

// Adds function(k) to the bits of four numbers, and cuts off the lower halves.
template <typename Function>
__device__ Vector<uint16_t> cut_after_adding(const Numbers& values, const Function& function) {
  const auto sum = [&](int k) { return computed_bits(values.of[k]) + function(k); };
  return {{upper_halves(sum(0), sum(1)), upper_halves(sum(2), sum(3))}};
}

// split_weight of four numbers.
__device__ inline Vector<uint16_t> upper_vector(const Numbers& values) {
  return cut_after_adding(values, [](int) { return 0x8000u; });
}
__device__ inline Vector<uint16_t> remainder_vector(const Numbers& values) {
  const auto bits = [&](int k) { return computed_bits(values.of[k]); };
  return {{lower_halves(bits(0), bits(1)), lower_halves(bits(2), bits(3))}};
}

template <typename Narrow, typename Lane>
__device__ Vector<uint16_t> stochastic(const Numbers& values, const Lane& lane, RandomKey key) {
  const LaneRandom random(key, lane);
  if constexpr (std::is_same_v<Narrow, Bf16>)
    return cut_after_adding(values, [&](int k) { return random.of(k); });
  return vector_of<uint16_t>([&](int k) { return Narrow::stochastic(values.of[k], random.of(k)); });
}

template <typename Word>
__device__ Raw raw_of(const Vector<Word>& vector) {
  Raw raw;
  memcpy(raw.words, &vector, sizeof(vector));
  return raw;
}

// The bits of updated weights, as many as their type has.
template <typename Lane>
__device__ Raw weight_bits(const UpdateSpan& span, const Lane& lane, const Numbers& values,
                           Rounding rounding, RandomKey key) {
  const bool is_bf16 = span.weight_dtype == DType::kBFloat16;
  if (span.weight_dtype == DType::kFloat32)
    return raw_of(vector_of<float>([&](int k) { return values.of[k]; }));
  if (span.main != MainWeight::kIsWeight)
    return is_bf16 ? raw_of(upper_vector(values)) : raw_of(nearest<Fp16>(values));
  if (rounding == Rounding::kStochastic)
    return is_bf16 ? raw_of(stochastic<Bf16>(values, lane, key))
                   : raw_of(stochastic<Fp16>(values, lane, key));
  return is_bf16 ? raw_of(nearest<Bf16>(values)) : raw_of(nearest<Fp16>(values));
}

// Returns the weights' new bits.
template <typename Lane>
__device__ Raw store_weight(const UpdateSpan& span, const Lane& lane, const Numbers& values,
                            Rounding rounding, RandomKey key) {
  const Raw bits = weight_bits(span, lane, values, rounding, key);
  if (span.weight_dtype == DType::kFloat32) {
    store(span.weight, lane, bits.as<float>());
  } else {
    store(span.weight, lane, bits.as<uint16_t>());
  }
  if (span.main == MainWeight::kSplit) store(span.main_weight, lane, remainder_vector(values));
  if (span.main == MainWeight::kSeparate) store_wide(span.main_weight, lane, values);
  return bits;
}

// Whether updates set the marks of changed weights (update_span.h).
enum class Marks : uint8_t { kNone, kSet };

// Marks the weights of a block that differ from `before`; all lanes of a warp call it together.
template <typename Lane>
__device__ void mark_changed(const UpdateSpan& span, const Lane& lane, const RawWeight& before,
                             const Raw& now) {
  Raw old = before.weight;
  if (span.main == MainWeight::kSeparate)  // the weight itself was not loaded; it is never random
    old = weight_bits(span, lane, widened<Fp32>(before.main.as<float>()), Rounding::kNearest, {});
  const bool is_wide = span.weight_dtype == DType::kFloat32;
  const auto is_changed = [&](int k) {
    const uint32_t different =
        is_wide ? old.words[k] ^ now.words[k]
                : (old.words[k / 2] ^ now.words[k / 2]) & (k % 2 == 0 ? 0x0000FFFFu : 0xFFFF0000u);
    return different != 0 && lane.has(k) ? 1u : 0u;
  };
  // Lanes 2 j and 2 j + 1 have the elements of bit j: of the first four numbers of 16 bits, which
  // are two words, and of the last four.
  const int number = threadIdx.x % kWarp;
  const int bit = number / 2;
  const uint32_t words[2] = {is_changed(0) << bit | is_changed(1) << (bit + 16),
                             is_changed(2) << bit | is_changed(3) << (bit + 16)};
  uint32_t mine = 0;
#pragma unroll
  for (int word = 0; word < 4; ++word) {
    const uint32_t all = __reduce_or_sync(kAllLanes, number % 2 == word / 2 ? words[word % 2] : 0u);
    if (number == word) mine = all;
  }
  if (mine == 0) return;
  const int64_t block = (lane.begin - kVector * number + span.flat_begin % kScaleBlock);
  auto* marks = reinterpret_cast<uint32_t*>(span.marks + block / kScaleBlock * kMarkLanes);
  atomicOr(marks + number, mine);  // nobody else writes this word, but so no lane waits for it
}

// --- moments -------------------------------------------------------------------------------------

__device__ inline Numbers first_moment(const Moment& moment, const Raw& raw, float scale) {
  const Numbers values = widened(moment.dtype, raw);
  return each([&](int k) { return values.of[k] * scale; });
}

__device__ inline Numbers second_moment(const Moment& moment, const Raw& raw, float scale) {
  const Numbers values = first_moment(moment, raw, scale);
  if (!is_scaled(moment.dtype)) return values;
  return each([&](int k) { return values.of[k] * values.of[k]; });
}

// The scale of a block whose numbers the lanes hold together (zeros for lanes without elements).
struct SharedScale {
  float scale;
  bool is_of_all;  // no number is NaN or Inf, so all are in range

  __device__ float inverse() const { return inverse_scale(scale); }
};

template <typename Narrow>
__device__ SharedScale shared_scale(const Measured& values) {
  uint32_t largest = __reduce_max_sync(kAllLanes, __float_as_uint(values.largest));
  const bool is_of_all = largest < 0x7F800000u;
  if (!is_of_all) {
    largest = 0;
#pragma unroll
    for (int k = 0; k < kVector; ++k)
      largest = max(largest, finite_magnitude_bits(values.numbers.of[k]));
    largest = __reduce_max_sync(kAllLanes, largest);
  }
  return {.scale = block_scale<Narrow>(largest), .is_of_all = is_of_all};
}

// The functions below store a lane's part of a block and return the block's scale, 1 if there is
// none.

template <typename Narrow, typename Lane>
__device__ float store_scaled(const Measured& values, const Moment& moment, const Lane& lane) {
  const SharedScale shared = shared_scale<Narrow>(values);
  const Numbers scaled = each([&](int k) { return values.numbers.of[k] * shared.inverse(); });
  if (shared.is_of_all) {
    store(moment.values, lane, nearest_in_range<Narrow>(scaled));
  } else {
    store(moment.values, lane, nearest<Narrow>(scaled));
  }
  return shared.scale;
}

// If all numbers of a lane are normal numbers of the type, the device's own conversion makes the
// codes that root_code chooses.
template <typename Narrow, typename Lane>
__device__ float store_roots(const Measured& roots, const Moment& moment, const Lane& lane,
                             RandomKey key) {
  const SharedScale shared = shared_scale<Narrow>(roots);
  const Numbers scaled = each([&](int k) { return roots.numbers.of[k] * shared.inverse(); });
  const LaneRandom random(key, lane);
  if (shared.is_of_all && roots.least * shared.inverse() >= Narrow::kMinNormal) {
    const Numbers chosen = each([&](int k) {
      const auto [below, above, code] = Narrow::normal_neighbours(scaled.of[k]);
      return root_goes_up(scaled.of[k], below, above, random.of(k)) ? above : below;
    });
    store(moment.values, lane, nearest_in_range<Narrow>(chosen));
  } else {
    store(moment.values, lane, vector_of<typename Narrow::Code>([&](int k) {
            return root_code<Narrow>(scaled.of[k], random.of(k));
          }));
  }
  return shared.scale;
}

template <typename Lane>
__device__ float store_first(const Measured& values, const Moment& moment, const Lane& lane) {
  if (moment.dtype == DType::kFloat16) return store_scaled<Fp16>(values, moment, lane);
  if (moment.dtype == DType::kFloat8E4M3) return store_scaled<Fp8E4M3>(values, moment, lane);
  if (moment.dtype == DType::kFloat8E5M2) return store_scaled<Fp8E5M2>(values, moment, lane);
  if (moment.dtype == DType::kBFloat16) {
    store(moment.values, lane, nearest<Bf16>(values.numbers));
  } else {
    store_wide(moment.values, lane, values.numbers);
  }
  return 1.0f;
}

template <typename Lane>
__device__ float store_second(const Numbers& values, const Measured& roots, const Moment& moment,
                              const Lane& lane, RandomKey key) {
  if (moment.dtype == DType::kFloat16) return store_roots<Fp16>(roots, moment, lane, key);
  if (moment.dtype == DType::kFloat8E4M3) return store_roots<Fp8E4M3>(roots, moment, lane, key);
  if (moment.dtype == DType::kFloat8E5M2) return store_roots<Fp8E5M2>(roots, moment, lane, key);
  if (moment.dtype == DType::kBFloat16) {
    store(moment.values, lane, stochastic<Bf16>(values, lane, key));
  } else {
    store_wide(moment.values, lane, values);
  }
  return 1.0f;
}

// --- scales of several blocks --------------------------------------------------------------------

// The scales of a moment's blocks, held by a warp that works on several blocks in a row.

// A memory sector, 32 bytes, holds so many scales. Single stores would keep memory as busy as
// whole sectors: an update with two fp8 moments would lose a tenth of its speed.
inline constexpr int kMaxRun = 8;
static_assert(kMaxRun <= kWarp);

// Lane k holds the scale of the run's block k. All scales are 1 if the moment has none.
class RunScales {
 public:
  // Loads the scales of `count` blocks, beginning with `begin`.
  __device__ RunScales(const Moment& moment, int64_t begin, int count)
      : moment_(moment), begin_(begin), lane_(threadIdx.x % kWarp), has_one_(lane_ < count) {
    if (is_scaled(moment_.dtype) && has_one_) scale_ = moment_.scales[begin_ + lane_];
  }
  __device__ float of(int k) const {
    return is_scaled(moment_.dtype) ? __shfl_sync(kAllLanes, scale_, k) : 1.0f;
  }
  __device__ void set(int k, float scale) {
    if (lane_ == k) scale_ = scale;
  }
  __device__ void store() const {
    if (is_scaled(moment_.dtype) && has_one_) moment_.scales[begin_ + lane_] = scale_;
  }

 private:
  const Moment& moment_;
  const int64_t begin_;
  const int lane_;
  const bool has_one_;
  float scale_ = 1.0f;
};

}  // namespace fsdp
