// Four neighbouring numbers on their way between memory and fp32, by a device's own conversions
// where it has them: the bits are those of narrow_float.h, which knows every type one by one.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "fsdp/base/narrow_float.h"

namespace fsdp {

inline constexpr int kVector = 4;

// Moved at once.
template <typename Word>
struct alignas(kVector * sizeof(Word)) Vector {
  Word of[kVector];
};

struct Numbers {
  float of[kVector];
};

template <typename Function>
__device__ Numbers each(const Function& function) {
  Numbers numbers;
#pragma unroll
  for (int k = 0; k < kVector; ++k) numbers.of[k] = function(k);
  return numbers;
}

template <typename Word, typename Function>
__device__ Vector<Word> vector_of(const Function& function) {
  Vector<Word> vector;
#pragma unroll
  for (int k = 0; k < kVector; ++k) vector.of[k] = static_cast<Word>(function(k));
  return vector;
}

// fp8 has instructions from 8.9 on.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
inline constexpr bool kConvertsFp8 = true;
#else
inline constexpr bool kConvertsFp8 = false;
#endif

namespace narrow {

// One instruction per pair; the first number is in the lower half.
__device__ inline uint32_t bf16_pair(float first, float second) {
  uint32_t pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(second), "f"(first));
  return pair;
}
__device__ inline uint32_t fp16_pair(float first, float second) {
  uint32_t pair;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(second), "f"(first));
  return pair;
}
__device__ inline float widened_fp16(uint16_t code) {
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(code));
  return value;
}

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
__device__ inline uint16_t e4m3_pair(float first, float second) {
  uint16_t pair;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(second), "f"(first));
  return pair;
}
__device__ inline uint16_t e5m2_pair(float first, float second) {
  uint16_t pair;
  asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(second), "f"(first));
  return pair;
}
__device__ inline uint32_t fp16_of_e4m3(uint16_t pair) {
  uint32_t result;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(result) : "h"(pair));
  return result;
}
#else
__device__ inline uint16_t e4m3_pair(float, float) { return 0; }
__device__ inline uint16_t e5m2_pair(float, float) { return 0; }
__device__ inline uint32_t fp16_of_e4m3(uint16_t) { return 0; }
#endif

template <typename Code>
__device__ Vector<Code> as_vector(uint32_t low, uint32_t high) {
  const uint32_t words[] = {low, high};
  Vector<Code> vector;
  static_assert(sizeof(vector) <= sizeof(words));
  memcpy(&vector, words, sizeof(vector));
  return vector;
}

}  // namespace narrow

template <typename Narrow>
__device__ Numbers widened(const Vector<typename Narrow::Code>& codes) {
  return each([&](int k) { return Narrow::widened(codes.of[k]); });
}
template <>
__device__ inline Numbers widened<Fp16>(const Vector<uint16_t>& codes) {
  return each([&](int k) { return narrow::widened_fp16(codes.of[k]); });
}
template <>
__device__ inline Numbers widened<Fp8E4M3>(const Vector<uint8_t>& codes) {
  if constexpr (!kConvertsFp8) {
    return each([&](int k) { return Fp8E4M3::widened(codes.of[k]); });
  } else {
    uint16_t pairs[2];
    memcpy(pairs, &codes, sizeof(pairs));
    const uint32_t halves[] = {narrow::fp16_of_e4m3(pairs[0]), narrow::fp16_of_e4m3(pairs[1])};
    return each([&](int k) {
      return narrow::widened_fp16(static_cast<uint16_t>(halves[k / 2] >> (16 * (k % 2))));
    });
  }
}
// e5m2 is the upper half of fp16.
template <>
__device__ inline Numbers widened<Fp8E5M2>(const Vector<uint8_t>& codes) {
  return each([&](int k) {
    return narrow::widened_fp16(static_cast<uint16_t>(static_cast<uint32_t>(codes.of[k]) << 8));
  });
}

__device__ inline bool has_nan(const Numbers& values) {
  return isunordered(values.of[0], values.of[1]) || isunordered(values.of[2], values.of[3]);
}

// To nearest, ties to even, where no number is NaN, Inf or too large for the type.
template <typename Narrow>
__device__ Vector<typename Narrow::Code> nearest_in_range(const Numbers& values) {
  using Code = typename Narrow::Code;
  const float* v = values.of;
  if constexpr (std::is_same_v<Narrow, Bf16>) {
    return narrow::as_vector<Code>(narrow::bf16_pair(v[0], v[1]), narrow::bf16_pair(v[2], v[3]));
  } else if constexpr (std::is_same_v<Narrow, Fp16>) {
    return narrow::as_vector<Code>(narrow::fp16_pair(v[0], v[1]), narrow::fp16_pair(v[2], v[3]));
  } else if constexpr (!kConvertsFp8) {
    return vector_of<Code>([&](int k) { return Narrow::nearest(v[k]); });
  } else {
    constexpr bool kIsE4M3 = std::is_same_v<Narrow, Fp8E4M3>;
    const uint32_t low = kIsE4M3 ? narrow::e4m3_pair(v[0], v[1]) : narrow::e5m2_pair(v[0], v[1]);
    const uint32_t high = kIsE4M3 ? narrow::e4m3_pair(v[2], v[3]) : narrow::e5m2_pair(v[2], v[3]);
    return narrow::as_vector<Code>(low | high << 16, 0);
  }
}

// Any numbers. A device writes NaN with other bits than a host.
template <typename Narrow>
__device__ Vector<typename Narrow::Code> nearest(const Numbers& values) {
  constexpr bool kIsWide = std::is_same_v<Narrow, Bf16> || std::is_same_v<Narrow, Fp16>;
  if constexpr (kIsWide) {
    if (!has_nan(values)) return nearest_in_range<Narrow>(values);
  }
  return vector_of<typename Narrow::Code>([&](int k) { return Narrow::nearest(values.of[k]); });
}

}  // namespace fsdp
