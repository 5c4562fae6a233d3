// Memory for an optimizer's span in any combination of types, and its contents as plain numbers.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>
#include <vector>

#include "fsdp/base/text.h"
#include "fsdp/optim/kernels/update_span.h"

namespace fsdp::testing {

// Widens one number by the definition of its type.
inline double decoded(DType dtype, const void* values, int64_t index) {
  if (dtype == DType::kFloat32) return static_cast<const float*>(values)[index];
  const bool is_half = dtype == DType::kFloat16 || dtype == DType::kBFloat16;
  const uint32_t code = is_half ? static_cast<const uint16_t*>(values)[index]
                                : static_cast<const uint8_t*>(values)[index];
  const int bits = is_half ? 16 : 8;
  int mantissa_bits = 7;
  if (dtype == DType::kFloat16) mantissa_bits = 10;
  if (dtype == DType::kFloat8E4M3) mantissa_bits = 3;
  if (dtype == DType::kFloat8E5M2) mantissa_bits = 2;
  const int exponent_bits = bits - 1 - mantissa_bits;
  const int bias = (1 << (exponent_bits - 1)) - 1;
  const uint32_t mantissa = code & ((1u << mantissa_bits) - 1);
  const int exponent = static_cast<int>((code >> mantissa_bits) & ((1u << exponent_bits) - 1));
  const double sign = (code >> (bits - 1)) != 0 ? -1.0 : 1.0;
  const bool is_top = exponent == (1 << exponent_bits) - 1;
  if (dtype == DType::kFloat8E4M3) {
    if (is_top && mantissa == 7) return std::nan("");
  } else if (is_top) {
    return mantissa != 0 ? std::nan("") : sign * HUGE_VAL;
  }
  if (exponent == 0) return sign * std::ldexp(mantissa, 1 - bias - mantissa_bits);
  return sign * std::ldexp(mantissa + (1u << mantissa_bits), exponent - bias - mantissa_bits);
}

// The distance between neighbours around a number.
inline double spacing(DType dtype, double value) {
  int mantissa_bits = 23;
  int smallest_exponent = -126;
  if (dtype == DType::kBFloat16) mantissa_bits = 7;
  if (dtype == DType::kFloat16) mantissa_bits = 10, smallest_exponent = -14;
  if (dtype == DType::kFloat8E4M3) mantissa_bits = 3, smallest_exponent = -6;
  if (dtype == DType::kFloat8E5M2) mantissa_bits = 2, smallest_exponent = -14;
  const int exponent = value == 0.0 ? smallest_exponent : std::ilogb(value);
  return std::ldexp(1.0, std::max(exponent, smallest_exponent) - mantissa_bits);
}

struct UpdateTypes {
  DType gradient = DType::kFloat32;
  DType weight = DType::kFloat32;
  MainWeight main = MainWeight::kIsWeight;
  DType first = DType::kFloat32;
  DType second = DType::kFloat32;
};

inline std::string text_of(const UpdateTypes& types) {
  const std::string_view mains[] = {"", "+fp32", "+remainder"};
  return concat("gradient ", name_of(types.gradient), ", weight ", name_of(types.weight),
                mains[static_cast<size_t>(types.main)], ", moments ", name_of(types.first), " and ",
                name_of(types.second));
}

inline std::vector<UpdateTypes> all_update_types() {
  std::vector<UpdateTypes> all;
  const DType plain[] = {DType::kFloat32, DType::kBFloat16, DType::kFloat16};
  const DType moments[] = {DType::kFloat32, DType::kBFloat16, DType::kFloat16, DType::kFloat8E4M3,
                           DType::kFloat8E5M2};
  const auto add = [&](DType weight, MainWeight main) {
    for (const DType gradient : plain)
      for (const DType first : moments)
        for (const DType second : moments) all.push_back({gradient, weight, main, first, second});
  };
  for (const DType weight : plain) {
    add(weight, MainWeight::kIsWeight);
    add(weight, MainWeight::kSeparate);
  }
  add(DType::kBFloat16, MainWeight::kSplit);
  return all;
}

// Everything an update reads and writes, on the host.
struct UpdateMemory {
  using Bytes = std::vector<std::byte>;

  UpdateMemory(const UpdateTypes& the_types, int64_t the_numel, int64_t the_flat_begin)
      : types(the_types), numel(the_numel), flat_begin(the_flat_begin) {
    const auto bytes = [&](int64_t each) { return Bytes(static_cast<size_t>(each * numel)); };
    const auto scales = [&](DType dtype) {
      const int64_t count = is_scaled(dtype) ? num_scales({flat_begin, flat_begin + numel}) : 0;
      return std::vector<float>(static_cast<size_t>(count));
    };
    gradient = bytes(element_bytes(types.gradient));
    weight = bytes(element_bytes(types.weight));
    if (types.main == MainWeight::kSeparate) main_weight = bytes(4);
    if (types.main == MainWeight::kSplit) main_weight = bytes(2);
    first = bytes(element_bytes(types.first));
    second = bytes(element_bytes(types.second));
    first_scales = scales(types.first);
    second_scales = scales(types.second);
  }

  // Marks of changed weights, none of which is set.
  void keep_marks() {
    marks.assign(static_cast<size_t>(num_mark_lanes({flat_begin, flat_begin + numel})), 0);
  }

  UpdateSpan span() {
    return {
        .gradient = gradient.data(),
        .gradient_dtype = types.gradient,
        .weight = weight.data(),
        .weight_dtype = types.weight,
        .main = types.main,
        .main_weight = main_weight.empty() ? nullptr : main_weight.data(),
        .first = {.values = first.data(), .scales = first_scales.data(), .dtype = types.first},
        .second = {.values = second.data(), .scales = second_scales.data(), .dtype = types.second},
        .marks = marks.empty() ? nullptr : marks.data(),
        .numel = numel,
        .flat_begin = flat_begin,
        .group = 3,
        .rate_scale = 0.5f,
        .weight_decay = 0.125f};
  }

  // Gradients whose sizes differ by orders of magnitude, the same for the same seed and position.
  void draw_gradients(uint32_t seed) {
    for (int64_t i = 0; i < numel; ++i) {
      const float value = drawn(seed, flat_begin + i) * std::exp(2.0f * drawn(77, flat_begin + i));
      write(types.gradient, gradient, i, value);
    }
  }

  // Weights that all types hold exactly.
  void draw_weights(uint32_t seed) {
    for (int64_t i = 0; i < numel; ++i) {
      uint32_t bits = 0;
      const float value = drawn(seed, flat_begin + i);
      std::memcpy(&bits, &value, 4);
      bits &= 0xFFFF0000u;
      float exact = 0;
      std::memcpy(&exact, &bits, 4);
      if (std::abs(exact) < 1e-4f) exact = 0.0f;  // fp16 holds no 8 bits of smaller ones
      write(types.weight, weight, i, exact);
      if (types.main == MainWeight::kSeparate) write(DType::kFloat32, main_weight, i, exact);
    }
  }

  // The weight as the optimizer sees it.
  double main_value(int64_t i) const {
    if (types.main == MainWeight::kSeparate) return decoded(DType::kFloat32, main_weight.data(), i);
    if (types.main == MainWeight::kSplit) {
      uint16_t upper = 0;
      int16_t remainder = 0;
      std::memcpy(&upper, weight.data() + 2 * i, 2);
      std::memcpy(&remainder, main_weight.data() + 2 * i, 2);
      const uint32_t bits = (static_cast<uint32_t>(upper) << 16) + static_cast<uint32_t>(remainder);
      float value = 0;
      std::memcpy(&value, &bits, 4);
      return value;
    }
    return decoded(types.weight, weight.data(), i);
  }
  double first_value(int64_t i) const {
    return decoded(types.first, first.data(), i) * scale(first_scales, i);
  }
  // Scaled types hold the root.
  double second_value(int64_t i) const {
    const double value = decoded(types.second, second.data(), i) * scale(second_scales, i);
    return is_scaled(types.second) ? value * value : value;
  }
  double scale(const std::vector<float>& scales, int64_t i) const {
    if (scales.empty()) return 1.0;
    return scales[static_cast<size_t>((flat_begin + i) / kScaleBlock - flat_begin / kScaleBlock)];
  }

  bool operator==(const UpdateMemory& other) const {
    return gradient == other.gradient && weight == other.weight &&
           main_weight == other.main_weight && first == other.first && second == other.second &&
           first_scales == other.first_scales && second_scales == other.second_scales &&
           marks == other.marks;
  }

  UpdateTypes types;
  int64_t numel;
  int64_t flat_begin;
  Bytes gradient, weight, main_weight, first, second;
  std::vector<float> first_scales, second_scales;
  std::vector<uint16_t> marks;  // none unless keep_marks() was called

 private:
  // Nearly normal: the sum of four uniform numbers. (std::normal_distribution takes a logarithm of
  // a long double per number, which some compilers do not compute in advance.)
  static float drawn(uint32_t seed, int64_t position) {
    uint64_t x = (static_cast<uint64_t>(seed) << 40) + static_cast<uint64_t>(position);
    float sum = 0;
    for (int i = 0; i < 4; ++i) {
      x = (x ^ (x >> 31)) * 0x9E3779B97F4A7C15u + 0x1234567u;
      sum += static_cast<float>(x >> 40) * 0x1p-24f;
    }
    return (sum - 2.0f) * 1.7320508f;
  }

  // Cuts off digits that the type cannot hold.
  static void write(DType dtype, Bytes& to, int64_t i, float value) {
    uint32_t bits = 0;
    std::memcpy(&bits, &value, 4);
    if (dtype == DType::kFloat32) {
      std::memcpy(to.data() + 4 * i, &bits, 4);
    } else if (dtype == DType::kBFloat16) {
      const auto code = static_cast<uint16_t>(bits >> 16);
      std::memcpy(to.data() + 2 * i, &code, 2);
    } else {
      const int exponent = value == 0.0f ? -14 : std::max(-14, std::ilogb(value));
      const auto mantissa =
          static_cast<uint32_t>(std::ldexp(std::abs(static_cast<double>(value)), 10 - exponent));
      const uint32_t magnitude = mantissa + (static_cast<uint32_t>(exponent + 14) << 10);
      const auto code = static_cast<uint16_t>((value < 0 ? 0x8000u : 0u) | magnitude);
      std::memcpy(to.data() + 2 * i, &code, 2);
    }
  }
};

}  // namespace fsdp::testing
