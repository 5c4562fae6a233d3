// Four neighbouring numbers on their way between memory and fp32, by a device's own conversions
// where it has them: the bits are those of narrow_float.h, which knows every type one by one.
#pragma once

#include <cstdint>
#include <type_traits>

#include "fsdp/base/narrow_float.h"

namespace fsdp {

inline constexpr int kVector = 4;

// Moved at once. As words of 32 bits: of an array of bytes a compiler makes variables, and spends
// more on taking them apart and putting them together than a kernel does on numbers.
template <typename Word>
struct alignas(kVector * sizeof(Word)) Vector {
  static constexpr int kPerWord = sizeof(uint32_t) / sizeof(Word);
  static constexpr int kBits = 8 * sizeof(Word);
  uint32_t words[kVector / kPerWord];

  __device__ Word operator[](int k) const {
    if constexpr (kPerWord == 1) return __builtin_bit_cast(Word, words[k]);
    if constexpr (kPerWord != 1)
      return static_cast<Word>(words[k / kPerWord] >> (k % kPerWord * kBits));
  }
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
  using Result = Vector<Word>;
  Result vector{};
#pragma unroll
  for (int k = 0; k < kVector; ++k) {
    const auto word = static_cast<Word>(function(k));
    if constexpr (Result::kPerWord == 1) {
      vector.words[k] = __builtin_bit_cast(uint32_t, word);
    } else {
      const uint32_t code = static_cast<std::make_unsigned_t<Word>>(word);
      vector.words[k / Result::kPerWord] |= code << (k % Result::kPerWord * Result::kBits);
    }
  }
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

}  // namespace narrow

template <typename Narrow>
__device__ Numbers widened(const Vector<typename Narrow::Code>& codes) {
  return each([&](int k) { return Narrow::widened(codes[k]); });
}
template <>
__device__ inline Numbers widened<Fp16>(const Vector<uint16_t>& codes) {
  return each([&](int k) { return narrow::widened_fp16(codes[k]); });
}
template <>
__device__ inline Numbers widened<Fp8E4M3>(const Vector<uint8_t>& codes) {
  if constexpr (!kConvertsFp8) {
    return each([&](int k) { return Fp8E4M3::widened(codes[k]); });
  } else {
    const uint32_t word = codes.words[0];
    const uint32_t halves[] = {narrow::fp16_of_e4m3(static_cast<uint16_t>(word)),
                               narrow::fp16_of_e4m3(static_cast<uint16_t>(word >> 16))};
    return each([&](int k) {
      return narrow::widened_fp16(static_cast<uint16_t>(halves[k / 2] >> (16 * (k % 2))));
    });
  }
}
// e5m2 is the upper half of fp16.
template <>
__device__ inline Numbers widened<Fp8E5M2>(const Vector<uint8_t>& codes) {
  return each([&](int k) {
    return narrow::widened_fp16(static_cast<uint16_t>(static_cast<uint32_t>(codes[k]) << 8));
  });
}

// Not by isunordered: on a device nvcc 13.0 makes a constant of it, without a warning.
__device__ inline bool has_nan(const Numbers& values) {
  const float* v = values.of;
  return ((v[0] != v[0]) | (v[1] != v[1]) | (v[2] != v[2]) | (v[3] != v[3])) != 0;
}

// Four numbers and their magnitudes: the least, and the largest, which is NaN if one of them is.
struct Measured {
  Numbers numbers;
  float least;
  float largest;
};

namespace narrow {
__device__ inline float max_or_nan(float a, float b) {
  float result;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
  return result;
}
}  // namespace narrow

__device__ inline Measured measured(const Numbers& numbers) {
  const float a = fabsf(numbers.of[0]), b = fabsf(numbers.of[1]);
  const float c = fabsf(numbers.of[2]), d = fabsf(numbers.of[3]);
  return {.numbers = numbers,
          .least = fminf(fminf(a, b), fminf(c, d)),
          .largest = narrow::max_or_nan(narrow::max_or_nan(a, b), narrow::max_or_nan(c, d))};
}

// To nearest, ties to even, where no number is NaN, Inf or too large for the type.
template <typename Narrow>
__device__ Vector<typename Narrow::Code> nearest_in_range(const Numbers& values) {
  const float* v = values.of;
  if constexpr (std::is_same_v<Narrow, Bf16>) {
    return {{narrow::bf16_pair(v[0], v[1]), narrow::bf16_pair(v[2], v[3])}};
  } else if constexpr (std::is_same_v<Narrow, Fp16>) {
    return {{narrow::fp16_pair(v[0], v[1]), narrow::fp16_pair(v[2], v[3])}};
  } else if constexpr (!kConvertsFp8) {
    return vector_of<typename Narrow::Code>([&](int k) { return Narrow::nearest(v[k]); });
  } else {
    constexpr bool kIsE4M3 = std::is_same_v<Narrow, Fp8E4M3>;
    const uint32_t low = kIsE4M3 ? narrow::e4m3_pair(v[0], v[1]) : narrow::e5m2_pair(v[0], v[1]);
    const uint32_t high = kIsE4M3 ? narrow::e4m3_pair(v[2], v[3]) : narrow::e5m2_pair(v[2], v[3]);
    return {{low | high << 16}};
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
