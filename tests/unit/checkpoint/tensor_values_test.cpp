// Numbers of every type, and conversions that round once.
#include "fsdp/checkpoint/format/tensor_stream.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <limits>
#include <vector>

namespace fsdp::tensor_values_test {
namespace {

constexpr double kInf = std::numeric_limits<double>::infinity();

template <typename Value>
std::span<const std::byte> bytes(const std::vector<Value>& values) {
  return std::as_bytes(std::span(values));
}

template <typename Value>
std::vector<double> values_of(DType dtype, const std::vector<Value>& codes) {
  std::vector<double> values(codes.size());
  read_values(dtype, bytes(codes), values);
  return values;
}

// The codes that a number becomes.
template <typename From>
uint16_t narrow(DType from, From value, DType to) {
  const std::vector<From> values = {value};
  std::vector<uint16_t> code(1);
  convert_values(from, bytes(values), to, std::as_writable_bytes(std::span(code)));
  return code[0];
}
uint16_t bf16(float value) { return narrow(DType::kFloat32, value, DType::kBFloat16); }
uint16_t fp16(float value) { return narrow(DType::kFloat32, value, DType::kFloat16); }
uint16_t bf16_of_double(double value) { return narrow(DType::kFloat64, value, DType::kBFloat16); }

TEST(TensorValues, ReadsEveryType) {
  EXPECT_EQ(values_of(DType::kFloat64, std::vector<double>{1e300, -2}),
            (std::vector<double>{1e300, -2}));
  EXPECT_EQ(values_of(DType::kFloat32, std::vector<float>{0.5f}), std::vector<double>{0.5});
  EXPECT_EQ(values_of(DType::kFloat16, std::vector<uint16_t>{0x3C00, 0xC000, 0x0001}),
            (std::vector<double>{1, -2, 0x1p-24}));
  EXPECT_EQ(values_of(DType::kBFloat16, std::vector<uint16_t>{0x3F80, 0xFF80}),
            (std::vector<double>{1, -kInf}));
  EXPECT_EQ(values_of(DType::kFloat8E4M3, std::vector<uint8_t>{0x38}), std::vector<double>{1});
  EXPECT_EQ(values_of(DType::kFloat8E5M2, std::vector<uint8_t>{0x3C}), std::vector<double>{1});
  EXPECT_EQ(values_of(DType::kInt64, std::vector<int64_t>{-7}), std::vector<double>{-7});
  EXPECT_EQ(values_of(DType::kInt32, std::vector<int32_t>{9}), std::vector<double>{9});
  EXPECT_EQ(values_of(DType::kUInt8, std::vector<uint8_t>{200}), std::vector<double>{200});
}

TEST(TensorValues, RoundsToNearestTiesToEven) {
  EXPECT_EQ(bf16(1.0f), 0x3F80);
  EXPECT_EQ(bf16(1.0f + 0x1p-8f), 0x3F80);             // a tie, down to the even one
  EXPECT_EQ(bf16(1.0f + 0x1p-7f + 0x1p-8f), 0x3F82);   // a tie, up to the even one
  EXPECT_EQ(bf16(1.0f + 0x1p-8f + 0x1p-20f), 0x3F81);  // above the tie
  EXPECT_EQ(bf16(-(1.0f + 0x1p-8f)), 0xBF80);
  EXPECT_EQ(fp16(1.0f + 0x1p-11f), 0x3C00);
  EXPECT_EQ(fp16(1.0f + 0x1p-10f + 0x1p-11f), 0x3C02);
  EXPECT_EQ(fp16(0x1p-25f), 0x0000);  // half of the smallest number: a tie
  EXPECT_EQ(fp16(0x1p-25f + 0x1p-30f), 0x0001);
  EXPECT_EQ(fp16(std::numeric_limits<float>::infinity()), 0x7C00);
  EXPECT_TRUE(std::isnan(values_of(DType::kFloat16, std::vector<uint16_t>{fp16(NAN)})[0]));
}

// As fp32 these are ties, and would go to the other neighbour.
TEST(TensorValues, RoundsDoublesOnce) {
  EXPECT_EQ(bf16_of_double(1.0 + 0x1p-8), 0x3F80);
  EXPECT_EQ(bf16_of_double(1.0 + 0x1p-8 + 0x1p-40), 0x3F81);
  EXPECT_EQ(bf16_of_double(1.0 + 0x1p-7 + 0x1p-8 - 0x1p-40), 0x3F81);
  EXPECT_EQ(bf16_of_double(-(1.0 + 0x1p-8 + 0x1p-40)), 0xBF81);
  EXPECT_EQ(narrow(DType::kFloat64, 1.0 + 0x1p-11 + 0x1p-50, DType::kFloat16), 0x3C01);
  EXPECT_EQ(bf16_of_double(kInf), 0x7F80);
  EXPECT_EQ(bf16_of_double(0x1.FEp127), 0x7F7F);
  EXPECT_EQ(bf16_of_double(1e300), 0x7F80);
  EXPECT_TRUE(
      std::isnan(values_of(DType::kBFloat16, std::vector<uint16_t>{bf16_of_double(NAN)})[0]));
}

TEST(TensorValues, WideningAndNarrowingKeepsEveryNumber) {
  for (const DType dtype : {DType::kFloat16, DType::kBFloat16}) {
    std::vector<uint16_t> codes(1u << 16);
    for (size_t i = 0; i < codes.size(); ++i) codes[i] = static_cast<uint16_t>(i);
    for (const DType wide : {DType::kFloat32, DType::kFloat64}) {
      std::vector<std::byte> widened(codes.size() * static_cast<size_t>(element_bytes(wide)));
      std::vector<uint16_t> back(codes.size());
      EXPECT_EQ(convert_values(dtype, bytes(codes), wide, widened), 0);
      EXPECT_EQ(convert_values(wide, widened, dtype, std::as_writable_bytes(std::span(back))), 0);
      const std::vector<double> values = values_of(dtype, codes);
      for (size_t i = 0; i < codes.size(); ++i)
        ASSERT_TRUE(std::isnan(values[i]) || back[i] == codes[i]) << name_of(dtype) << " " << i;
    }
  }
}

TEST(TensorValues, CountsFiniteNumbersThatDoNotFit) {
  const std::vector<float> values = {65504, 65519, 65520, -1e6f, INFINITY, NAN};
  std::vector<uint16_t> codes(values.size());
  const auto into = std::as_writable_bytes(std::span(codes));
  EXPECT_EQ(convert_values(DType::kFloat32, bytes(values), DType::kFloat16, into), 2);
  EXPECT_EQ(codes[1], 0x7BFF);
  EXPECT_EQ(codes[2], 0x7C00);
  EXPECT_EQ(convert_values(DType::kFloat32, bytes(values), DType::kBFloat16, into), 0);
  const std::vector<float> largest = {0x1.FEFFFEp127f, 0x1.FFp127f};
  EXPECT_EQ(convert_values(DType::kFloat32, bytes(largest), DType::kBFloat16, into.first(4)), 1);
  EXPECT_EQ(codes[0], 0x7F7F);
  const std::vector<double> wide = {0x1.FFFFFEp127, 0x1.FFFFFF0001p127, 1e39};
  std::vector<float> narrow_values(3);
  EXPECT_EQ(convert_values(DType::kFloat64, bytes(wide), DType::kFloat32,
                           std::as_writable_bytes(std::span(narrow_values))),
            2);
}

}  // namespace
}  // namespace fsdp::tensor_values_test
