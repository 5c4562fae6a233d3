// A block of a span on its way through the first-level cache: narrow numbers are widened to fp32,
// fp32 numbers are used in place. Loads and stores by type are here and one loop per rule is
// elsewhere, so the number of compiled loops is a sum over types instead of a product.
//
// For update_on_cpu.cpp, which compiles this for several instruction sets: everything must be
// inlined there.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cstdint>
#include <cstring>

#include "fsdp/base/compiler.h"
#include "fsdp/base/error.h"
#include "fsdp/base/narrow_float.h"
#include "fsdp/optim/kernels/moments.h"
#include "fsdp/optim/kernels/split_weight.h"
#include "fsdp/optim/kernels/update_math.h"
#include "fsdp/optim/kernels/update_span.h"

namespace fsdp::block {

// Four arrays of this size are 16 KiB: half of the smallest first-level cache in use.
inline constexpr int64_t kMaxNumel = 1024;
static_assert(kMaxNumel % kScaleBlock == 0);

// The elements of a block. A block does not cross a multiple of kMaxNumel in flat positions.
struct Place {
  int64_t begin = 0;  // in the span
  int64_t count = 0;
  int64_t position = 0;  // of `begin`, in the group's whole buffer
};

using Stage = std::array<float, kMaxNumel>;

// random_bits of every element of a block.
class RandomStage {
 public:
  using Bits [[gnu::may_alias]] = uint16_t;

  FSDP_INLINED const Bits* draw(const Place& place, RandomKey key) {
    static_assert(std::endian::native == std::endian::little);  // even elements have the lower bits
    const uint32_t first = static_cast<uint32_t>(place.position) >> 1;
    const auto count = static_cast<uint32_t>((place.count + (place.position & 1) + 1) / 2);
    FSDP_INDEPENDENT_ITERATIONS
    for (uint32_t i = 0; i < count; ++i) pairs_[i] = random_pair(key, first + i);
    return reinterpret_cast<const Bits*>(pairs_.data()) + (place.position & 1);
  }

 private:
  std::array<uint32_t, kMaxNumel / 2 + 1> pairs_;
};

// --- arrays of narrow numbers --------------------------------------------------------------------

template <typename Narrow>
FSDP_INLINED void widen(const void* codes, int64_t begin, int64_t count, float* out) {
  const auto* from = static_cast<const typename Narrow::Code*>(codes) + begin;
  FSDP_INDEPENDENT_ITERATIONS
  for (int64_t i = 0; i < count; ++i) out[i] = Narrow::widened(from[i]);
}

template <typename Narrow>
FSDP_INLINED void round_nearest(const float* values, void* codes, int64_t begin, int64_t count) {
  auto* to = static_cast<typename Narrow::Code*>(codes) + begin;
  FSDP_INDEPENDENT_ITERATIONS
  for (int64_t i = 0; i < count; ++i) to[i] = Narrow::nearest(values[i]);
}

template <typename Narrow>
FSDP_INLINED void round_stochastic(const float* values, void* codes, const Place& place,
                                   RandomKey key) {
  auto* to = static_cast<typename Narrow::Code*>(codes) + place.begin;
  RandomStage stage;
  const RandomStage::Bits* random = stage.draw(place, key);
  FSDP_INDEPENDENT_ITERATIONS
  for (int64_t i = 0; i < place.count; ++i) to[i] = Narrow::stochastic(values[i], random[i]);
}

// --- gradients and weights -----------------------------------------------------------------------

FSDP_INLINED const float* load_gradient(const UpdateSpan& span, const Place& place, Stage& stage) {
  if (span.gradient_dtype == DType::kFloat32)
    return static_cast<const float*>(span.gradient) + place.begin;
  if (span.gradient_dtype == DType::kBFloat16) {
    widen<Bf16>(span.gradient, place.begin, place.count, stage.data());
  } else {
    widen<Fp16>(span.gradient, place.begin, place.count, stage.data());
  }
  return stage.data();
}

FSDP_INLINED float* load_weight(const UpdateSpan& span, const Place& place, Stage& stage) {
  if (span.main == MainWeight::kSeparate)
    return static_cast<float*>(span.main_weight) + place.begin;
  if (span.main == MainWeight::kSplit) {
    const auto* upper = static_cast<const uint16_t*>(span.weight) + place.begin;
    const auto* remainder = static_cast<const int16_t*>(span.main_weight) + place.begin;
    FSDP_INDEPENDENT_ITERATIONS
    for (int64_t i = 0; i < place.count; ++i)
      stage[static_cast<size_t>(i)] = join_weight({.upper = upper[i], .remainder = remainder[i]});
  } else if (span.weight_dtype == DType::kFloat32) {
    return static_cast<float*>(span.weight) + place.begin;
  } else if (span.weight_dtype == DType::kBFloat16) {
    widen<Bf16>(span.weight, place.begin, place.count, stage.data());
  } else {
    widen<Fp16>(span.weight, place.begin, place.count, stage.data());
  }
  return stage.data();
}

FSDP_INLINED void store_split(const UpdateSpan& span, const Place& place, const float* values) {
  auto* upper = static_cast<uint16_t*>(span.weight) + place.begin;
  auto* remainder = static_cast<int16_t*>(span.main_weight) + place.begin;
  FSDP_INDEPENDENT_ITERATIONS
  for (int64_t i = 0; i < place.count; ++i) {
    const SplitWeight split = split_weight(values[i]);
    upper[i] = split.upper;
    remainder[i] = split.remainder;
  }
}

// The weight for computing, from its main weight, which is updated already.
FSDP_INLINED void store_beside_main(const UpdateSpan& span, const Place& place,
                                    const float* values) {
  if (span.weight_dtype == DType::kBFloat16) {
    auto* to = static_cast<uint16_t*>(span.weight) + place.begin;
    FSDP_INDEPENDENT_ITERATIONS
    for (int64_t i = 0; i < place.count; ++i) to[i] = rounded_away(values[i]);
  } else if (span.weight_dtype == DType::kFloat16) {
    round_nearest<Fp16>(values, span.weight, place.begin, place.count);
  } else {
    auto* to = static_cast<float*>(span.weight) + place.begin;
    FSDP_INDEPENDENT_ITERATIONS
    for (int64_t i = 0; i < place.count; ++i) to[i] = values[i];
  }
}

FSDP_INLINED void store_weight(const UpdateSpan& span, const Place& place, const float* values,
                               Rounding rounding, RandomKey key) {
  if (span.main == MainWeight::kSplit) return store_split(span, place, values);
  if (span.main == MainWeight::kSeparate) return store_beside_main(span, place, values);
  if (span.weight_dtype == DType::kFloat32) return;  // updated in place
  const bool is_bf16 = span.weight_dtype == DType::kBFloat16;
  if (rounding == Rounding::kStochastic) {
    if (is_bf16) return round_stochastic<Bf16>(values, span.weight, place, key);
    return round_stochastic<Fp16>(values, span.weight, place, key);
  }
  if (is_bf16) return round_nearest<Bf16>(values, span.weight, place.begin, place.count);
  round_nearest<Fp16>(values, span.weight, place.begin, place.count);
}

// --- moments -------------------------------------------------------------------------------------

// The scale of the element at a position.
FSDP_INLINED float& scale_at(const Moment& moment, int64_t span_position, int64_t position) {
  return moment.scales[position / kScaleBlock - span_position / kScaleBlock];
}

// Calls body(offset in the block, count, scale) for every part of the block that has one scale.
template <typename Body>
FSDP_INLINED void for_each_scale(const Moment& moment, int64_t span_position, const Place& place,
                                 Body body) {
  for (int64_t offset = 0; offset < place.count;) {
    const int64_t position = place.position + offset;
    const int64_t count = std::min(place.count - offset, kScaleBlock - position % kScaleBlock);
    body(offset, count, scale_at(moment, span_position, position));
    offset += count;
  }
}

template <MomentRole kRole, typename Narrow>
FSDP_INLINED void widen_scaled(const Moment& moment, int64_t span_position, const Place& place,
                               float* out) {
  const auto* codes = static_cast<const typename Narrow::Code*>(moment.values) + place.begin;
  for_each_scale(moment, span_position, place, [&](int64_t offset, int64_t count, float scale) {
    FSDP_INDEPENDENT_ITERATIONS
    for (int64_t i = offset; i < offset + count; ++i) {
      if constexpr (kRole == MomentRole::kFirst)
        out[i] = Narrow::widened(codes[i]) * scale;
      else
        out[i] = squared_root<Narrow>(codes[i], scale);
    }
  });
}

FSDP_INLINED uint32_t largest_magnitude(const float* values, int64_t count) {
  uint32_t largest = 0;
  for (int64_t i = 0; i < count; ++i) {
    const uint32_t magnitude = finite_magnitude_bits(values[i]);
    largest = magnitude > largest ? magnitude : largest;
  }
  return largest;
}

template <typename Narrow>
FSDP_INLINED void store_scaled(const float* values, const Moment& moment, int64_t span_position,
                               const Place& place) {
  auto* codes = static_cast<typename Narrow::Code*>(moment.values) + place.begin;
  for_each_scale(moment, span_position, place, [&](int64_t offset, int64_t count, float& scale) {
    scale = block_scale<Narrow>(largest_magnitude(values + offset, count));
    const float inverse = inverse_scale(scale);
    FSDP_INDEPENDENT_ITERATIONS
    for (int64_t i = offset; i < offset + count; ++i)
      codes[i] = Narrow::nearest(values[i] * inverse);
  });
}

template <typename Narrow>
FSDP_INLINED void store_roots(const float* roots, const Moment& moment, int64_t span_position,
                              const Place& place, RandomKey key) {
  auto* codes = static_cast<typename Narrow::Code*>(moment.values) + place.begin;
  RandomStage stage;
  const RandomStage::Bits* random = stage.draw(place, key);
  for_each_scale(moment, span_position, place, [&](int64_t offset, int64_t count, float& scale) {
    scale = block_scale<Narrow>(largest_magnitude(roots + offset, count));
    const float inverse = inverse_scale(scale);
    FSDP_INDEPENDENT_ITERATIONS
    for (int64_t i = offset; i < offset + count; ++i)
      codes[i] = root_code<Narrow>(roots[i] * inverse, random[i]);
  });
}

template <MomentRole kRole>
FSDP_INLINED float* load_moment(const Moment& moment, int64_t span_position, const Place& place,
                                Stage& stage) {
  if (moment.dtype == DType::kFloat32) return static_cast<float*>(moment.values) + place.begin;
  float* out = stage.data();
  if (moment.dtype == DType::kBFloat16) {
    widen<Bf16>(moment.values, place.begin, place.count, out);
  } else if (moment.dtype == DType::kFloat16) {
    widen_scaled<kRole, Fp16>(moment, span_position, place, out);
  } else if (moment.dtype == DType::kFloat8E4M3) {
    widen_scaled<kRole, Fp8E4M3>(moment, span_position, place, out);
  } else {
    widen_scaled<kRole, Fp8E5M2>(moment, span_position, place, out);
  }
  return out;
}

FSDP_INLINED void store_first(const float* values, const Moment& moment, int64_t span_position,
                              const Place& place) {
  if (moment.dtype == DType::kFloat32) return;  // updated in place
  if (moment.dtype == DType::kBFloat16)
    return round_nearest<Bf16>(values, moment.values, place.begin, place.count);
  if (moment.dtype == DType::kFloat16)
    return store_scaled<Fp16>(values, moment, span_position, place);
  if (moment.dtype == DType::kFloat8E4M3)
    return store_scaled<Fp8E4M3>(values, moment, span_position, place);
  store_scaled<Fp8E5M2>(values, moment, span_position, place);
}

// Stores roots if the type keeps roots.
FSDP_INLINED void store_second(const float* values, const Moment& moment, int64_t span_position,
                               const Place& place, RandomKey key) {
  if (moment.dtype == DType::kFloat32) return;  // updated in place
  if (moment.dtype == DType::kBFloat16)
    return round_stochastic<Bf16>(values, moment.values, place, key);
  if (moment.dtype == DType::kFloat16)
    return store_roots<Fp16>(values, moment, span_position, place, key);
  if (moment.dtype == DType::kFloat8E4M3)
    return store_roots<Fp8E4M3>(values, moment, span_position, place, key);
  store_roots<Fp8E5M2>(values, moment, span_position, place, key);
}

// --- marks: which of a block's weights' bits an update changes -----------------------------------

using Lanes [[gnu::vector_size(2 * kMarkLanes)]] = uint16_t;

// Calls update(i) for every element of the place, and marks those for which it returns a number
// other than 0.
template <typename Update>
FSDP_INLINED void mark_where(const UpdateSpan& span, const Place& place, const Update& update) {
  for (int64_t begin = 0; begin < place.count;) {
    const int64_t position = place.position + begin;
    const int64_t first = position % kScaleBlock;
    const int64_t count = std::min(place.count - begin, kScaleBlock - first);
    uint16_t* const marks = span.marks + first_mark_lane(span.flat_begin, position);
    if (count == kScaleBlock) {
      Lanes marked;
      std::memcpy(&marked, marks, sizeof(marked));
      Lanes bit = {1, 1, 1, 1, 1, 1, 1, 1};
      for (int64_t i = begin; i < begin + kScaleBlock; i += kMarkLanes) {
        alignas(16) std::array<uint16_t, kMarkLanes> changed;
        FSDP_INDEPENDENT_ITERATIONS
        for (int64_t k = 0; k < kMarkLanes; ++k) changed[static_cast<size_t>(k)] = update(i + k);
        Lanes lanes;
        std::memcpy(&lanes, changed.data(), sizeof(lanes));
        marked |= reinterpret_cast<Lanes>(lanes != 0) & bit;
        bit += bit;
      }
      std::memcpy(marks, &marked, sizeof(marked));
    } else {
      for (int64_t i = 0; i < count; ++i) {
        const int64_t k = first + i;
        const auto bit = static_cast<uint16_t>(1u << k / kMarkLanes);
        if (update(begin + i) != 0) marks[k % kMarkLanes] |= bit;
      }
    }
    begin += count;
  }
}

// --- weights that go through a stage -------------------------------------------------------------

// The bits of a block's weights before the update, as many as their type has.
struct CodeStage {
  std::array<uint16_t, kMaxNumel> narrow;
  std::array<uint32_t, kMaxNumel> wide;
};

// Where a main weight lies apart, the weight's bits are made of it: on a host there may be no
// weight, because the device has it.
FSDP_INLINED void keep_codes(const UpdateSpan& span, const Place& place, CodeStage& stage) {
  if (span.marks == nullptr) return;
  const auto count = static_cast<size_t>(place.count);
  const bool is_separate = span.main == MainWeight::kSeparate;
  if (span.weight_dtype == DType::kFloat32) {
    const void* from = is_separate ? span.main_weight : span.weight;
    std::memcpy(stage.wide.data(), static_cast<const uint32_t*>(from) + place.begin, count * 4);
  } else if (!is_separate) {
    std::memcpy(stage.narrow.data(), static_cast<const uint16_t*>(span.weight) + place.begin,
                count * 2);
  } else if (span.weight_dtype == DType::kBFloat16) {
    const auto* from = static_cast<const float*>(span.main_weight) + place.begin;
    FSDP_INDEPENDENT_ITERATIONS
    for (size_t i = 0; i < count; ++i) stage.narrow[i] = rounded_away(from[i]);
  } else {
    round_nearest<Fp16>(static_cast<const float*>(span.main_weight) + place.begin,
                        stage.narrow.data(), 0, place.count);
  }
}

// After the new weights are stored.
FSDP_INLINED void mark_changed(const UpdateSpan& span, const Place& place, const CodeStage& stage) {
  if (span.marks == nullptr) return;
  if (span.weight_dtype == DType::kFloat32) {
    const auto* now = static_cast<const uint32_t*>(span.weight) + place.begin;
    mark_where(span, place, [&](int64_t i) -> uint16_t {
      return now[i] != stage.wide[static_cast<size_t>(i)] ? 1 : 0;
    });
  } else {
    const auto* now = static_cast<const uint16_t*>(span.weight) + place.begin;
    mark_where(span, place, [&](int64_t i) -> uint16_t {
      return now[i] ^ stage.narrow[static_cast<size_t>(i)];
    });
  }
}

}  // namespace fsdp::block
