#include "fsdp/checkpoint/tensor_values.h"

#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <type_traits>

#include "fsdp/base/error.h"
#include "fsdp/base/narrow_float.h"

namespace fsdp {

namespace {

// Bytes of a file lie at any address.
template <typename Value>
Value load(const std::byte* from) {
  Value value;
  std::memcpy(&value, from, sizeof value);
  return value;
}

// Calls body(read), where read(address) is the number there, as it is or widened to fp32.
template <typename Body>
void with_reader(DType dtype, const Body& body) {
  switch (dtype) {
    case DType::kFloat64:
      return body([](const std::byte* at) { return load<double>(at); });
    case DType::kFloat32:
      return body([](const std::byte* at) { return load<float>(at); });
    case DType::kFloat16:
      return body([](const std::byte* at) { return Fp16::widened(load<Fp16::Code>(at)); });
    case DType::kBFloat16:
      return body([](const std::byte* at) { return Bf16::widened(load<Bf16::Code>(at)); });
    case DType::kFloat8E4M3:
      return body([](const std::byte* at) { return Fp8E4M3::widened(load<Fp8E4M3::Code>(at)); });
    case DType::kFloat8E5M2:
      return body([](const std::byte* at) { return Fp8E5M2::widened(load<Fp8E5M2::Code>(at)); });
    case DType::kInt64:
      return body([](const std::byte* at) { return load<int64_t>(at); });
    case DType::kInt32:
      return body([](const std::byte* at) { return load<int32_t>(at); });
    case DType::kUInt8:
      return body([](const std::byte* at) { return load<uint8_t>(at); });
  }
}

// fp64 as fp32 for those who round once more: cut, and the last bit says whether anything was cut.
// Rounding to a type of at most 22 bits then gives what rounding the fp64 number itself would;
// rounding to fp32 first could make a tie where there is none.
float rounded_to_odd(double value) {
  auto nearest = static_cast<float>(value);
  if (std::isnan(nearest) || static_cast<double>(nearest) == value) return nearest;
  auto bits = std::bit_cast<uint32_t>(nearest);
  const bool is_too_far = std::abs(static_cast<double>(nearest)) > std::abs(value);
  if (is_too_far) --bits;  // also from Inf to the largest number
  return std::bit_cast<float>(bits | 1u);
}
float rounded_to_odd(float value) { return value; }

// Calls body(write), where write(address, number) stores a number.
template <typename Body>
void with_writer(DType dtype, const Body& body) {
  const auto store = [](std::byte* to, auto value) { std::memcpy(to, &value, sizeof value); };
  switch (dtype) {
    case DType::kFloat64:
      return body([&](std::byte* to, auto value) { store(to, static_cast<double>(value)); });
    case DType::kFloat32:
      return body([&](std::byte* to, auto value) { store(to, static_cast<float>(value)); });
    case DType::kFloat16:
      return body(
          [&](std::byte* to, auto value) { store(to, Fp16::nearest(rounded_to_odd(value))); });
    case DType::kBFloat16:
      return body(
          [&](std::byte* to, auto value) { store(to, Bf16::nearest(rounded_to_odd(value))); });
    case DType::kFloat8E4M3:
    case DType::kFloat8E5M2:
    case DType::kInt64:
    case DType::kInt32:
    case DType::kUInt8:
      break;
  }
  FSDP_ASSERT(false, "no conversion to ", name_of(dtype));
}

// Finite numbers from here on become Inf.
double first_overflow(DType dtype) {
  switch (dtype) {
    case DType::kFloat16:
      return 65520.0;  // between the largest, 65504, and what would come next
    case DType::kBFloat16:
      return 0x1.FFp127;
    case DType::kFloat32:
      return 0x1.FFFFFFp127;
    case DType::kFloat64:
    case DType::kFloat8E4M3:
    case DType::kFloat8E5M2:
    case DType::kInt64:
    case DType::kInt32:
    case DType::kUInt8:
      break;
  }
  return std::numeric_limits<double>::infinity();
}

}  // namespace

void read_values(DType dtype, std::span<const std::byte> bytes, std::span<double> values) {
  const auto width = static_cast<size_t>(element_bytes(dtype));
  FSDP_ASSERT(bytes.size() == values.size() * width, bytes.size(), " bytes");
  with_reader(dtype, [&](auto read) {
    for (size_t i = 0; i < values.size(); ++i)
      values[i] = static_cast<double>(read(bytes.data() + i * width));
  });
}

int64_t convert_values(DType from, std::span<const std::byte> bytes, DType to,
                       std::span<std::byte> into) {
  FSDP_ASSERT(is_floating(from), "no conversion from ", name_of(from));
  const auto from_width = static_cast<size_t>(element_bytes(from));
  const auto to_width = static_cast<size_t>(element_bytes(to));
  const size_t numel = bytes.size() / from_width;
  FSDP_ASSERT(into.size() == numel * to_width, into.size(), " bytes");
  const double too_large = first_overflow(to);
  int64_t num_overflows = 0;
  with_reader(from, [&](auto read) {
    using Value = decltype(read(bytes.data()));
    if constexpr (std::is_floating_point_v<Value>) {
      with_writer(to, [&](auto write) {
        for (size_t i = 0; i < numel; ++i) {
          const Value value = read(bytes.data() + i * from_width);
          const double magnitude = std::abs(static_cast<double>(value));
          num_overflows += magnitude >= too_large && !std::isinf(magnitude) ? 1 : 0;
          write(into.data() + i * to_width, value);
        }
      });
    }
  });
  return num_overflows;
}

}  // namespace fsdp
