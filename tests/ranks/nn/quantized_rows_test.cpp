// Matrices as codes and scales, bit for bit.
#include <gtest/gtest.h>

#include <limits>
#include <string>

#include "fsdp/nn/layers/quantized_rows.h"
#include "fsdp/nn/layers/weight_products.h"
#include "fsdp/shard/group/quantize_part.h"
#include "support/layer_gradients.h"
#include "support/quantized_weights.h"

namespace fsdp::nn::quantized_rows_test {
namespace {

using namespace fsdp::testing::of_codes;
using fsdp::testing::waves;

BlockSize block_of(ScaleBlock block) {
  if (block == ScaleBlock::kMatrix) return {};
  return block == ScaleBlock::kRow ? BlockSize{1, 0} : BlockSize{1, kScalePiece};
}

// Zeros, numbers too small for scales, subnormal, of every size, huge, infinite and NaN.
at::Tensor awkward_rows(int64_t columns) {
  constexpr float kInf = std::numeric_limits<float>::infinity();
  const at::Tensor x = waves({11, columns}, 0.2);
  x[0].zero_();
  x[1].mul_(1e-14);
  x[2].mul_(1e-40);
  x[3].mul_(at::logspace(-20, 20, columns));
  x[4].mul_(3.3e38);
  x[5][1] = std::numeric_limits<float>::quiet_NaN();
  x[6][2] = kInf;
  x[7][3] = -kInf;
  x[8].mul_(448.0);
  x[9].mul_(-0.0);
  return x;
}

void expect_codes(const QuantizedRows& actual, const Codes& expected, const std::string& what) {
  const int64_t columns = expected.bytes.size(1);
  const at::Tensor bytes = actual.codes.view(at::kByte);
  EXPECT_TRUE(at::equal(bytes.narrow(1, 0, columns), expected.bytes)) << what;
  EXPECT_FALSE(bytes.narrow(1, columns, bytes.size(1) - columns).any().item<bool>()) << what;
  // Compares bits: NaNs are equal.
  EXPECT_TRUE(at::equal(actual.scales.contiguous().view(at::kInt), expected.scales.view(at::kInt)))
      << what << "\n"
      << actual.scales << "\n"
      << expected.scales;
}

TEST(QuantizedRows, AreCodesAndScalesOfTheDefinition) {
  for (const ScaleBlock block : {ScaleBlock::kMatrix, ScaleBlock::kRow, ScaleBlock::kPiece}) {
    for (const int64_t columns : {128, 300}) {
      for (const at::ScalarType type : {at::kFloat, at::kBFloat16}) {
        at::Tensor x = awkward_rows(columns);
        if (block == ScaleBlock::kMatrix) x = x.narrow(0, 0, 4);  // one NaN makes all codes NaN
        x = x.to(type);
        const std::string what = concat(static_cast<int>(block), ", ", columns);
        expect_codes(quantize_rows(x, block), quantized(x, block_of(block)), what);
        expect_codes(quantize_columns(x, block), quantized(x.t(), block_of(block)), what);
      }
    }
  }
}

// Gradients are divided by the tokens of a step, and multiplied by the scale of the loss.
TEST(QuantizedRows, HaveTheSameCodesAtAnyScale) {
  const at::Tensor x = waves({40, 160}, 0.2).to(at::kBFloat16);
  const at::Tensor by_column = waves({160}, 0.7, 1e-4);
  const at::Tensor by_row = waves({40}, 0.9, 1e-4);
  for (const ScaleBlock block : {ScaleBlock::kMatrix, ScaleBlock::kRow, ScaleBlock::kPiece}) {
    const bool is_one = block == ScaleBlock::kMatrix;  // multipliers would make two of it
    const auto forms = [&](const at::Tensor& numbers) {
      return is_one ? quantize_two_forms({{numbers, {}}}, block)
                    : quantize_two_forms({{numbers, by_column}}, block, by_row);
    };
    const TwoForms at_one = forms(x);
    for (const double scale : {0x1p-50, 0x1p-80, 0x1p60}) {
      const TwoForms at_scale = forms(x * scale);
      const auto expect_same = [&](const QuantizedRows& actual, const QuantizedRows& expected) {
        EXPECT_TRUE(at::equal(actual.codes.view(at::kByte), expected.codes.view(at::kByte)))
            << static_cast<int>(block) << ", " << scale;
        EXPECT_TRUE(at::equal(actual.scales, expected.scales * scale)) << scale;
      };
      expect_same(at_scale.by_rows, at_one.by_rows);
      expect_same(at_scale.by_columns.front(), at_one.by_columns.front());
    }
  }
}

TEST(QuantizedRows, MultiplyNumbersFirst) {
  const at::Tensor x = waves({40, 160}, 0.2).to(at::kBFloat16);
  const at::Tensor by_column = waves({160}, 0.7, 3.0);
  const at::Tensor by_row = waves({40}, 0.9, 0.01);
  for (const ScaleBlock block : {ScaleBlock::kRow, ScaleBlock::kPiece}) {
    const Codes rows = quantized(x.to(at::kFloat) * by_column, block_of(block));
    const Codes columns = quantized((x.to(at::kFloat) * by_row.unsqueeze(1)).t(), block_of(block));
    expect_codes(quantize_rows(x, block, by_column), rows, "rows");
    expect_codes(quantize_columns(x, block, by_row), columns, "columns");
    const TwoForms both = quantize_two_forms({{x, by_column}}, block, by_row);
    expect_codes(both.by_rows, rows, "rows of both");
    expect_codes(both.by_columns.front(), columns, "columns of both");
  }
}

TEST(QuantizedRows, OfMatricesSideBySideAreThoseOfOne) {
  const at::Tensor x = waves({40, 640}, 0.2).to(at::kBFloat16);
  const at::Tensor by_column = waves({640}, 0.7, 3.0);
  const at::Tensor by_row = waves({40}, 0.9, 0.01);
  for (const ScaleBlock block : {ScaleBlock::kRow, ScaleBlock::kPiece}) {
    const Codes rows = quantized(x.to(at::kFloat) * by_column, block_of(block));
    std::vector<MultipliedColumns> beside;
    for (const auto& [first, count] : {std::pair{0, 128}, {128, 256}, {384, 256}})
      beside.push_back({x.narrow(1, first, count), by_column.narrow(0, first, count)});
    expect_codes(quantize_rows(beside, block), rows, "rows");
    const TwoForms both = quantize_two_forms(beside, block, by_row);
    expect_codes(both.by_rows, rows, "rows of both");
    for (size_t i = 0; i < beside.size(); ++i)
      expect_codes(
          both.by_columns[i],
          quantized((beside[i].numbers.to(at::kFloat) * by_row.unsqueeze(1)).t(), block_of(block)),
          "columns of both");
  }
}

TEST(QuantizedRows, AreTransposedWithZerosAtTheEnd) {
  const at::Tensor codes = at::arange(35, at::kByte).view({5, 7}).view(at::kFloat8_e4m3fn);
  const at::Tensor turned = transposed_codes(codes).view(at::kByte);
  EXPECT_EQ(turned.sizes(), (at::IntArrayRef{7, 16}));
  EXPECT_TRUE(at::equal(turned.narrow(1, 0, 5), codes.view(at::kByte).t()));
  EXPECT_FALSE(turned.narrow(1, 5, 11).any().item<bool>());
  const at::Tensor wide = at::arange(48 * 7, at::kInt).to(at::kByte).view({48, 7});
  const at::Tensor parts = wide.view(at::kFloat8_e4m3fn);
  EXPECT_TRUE(
      at::equal(transposed_codes({parts.narrow(0, 0, 16), parts.narrow(0, 16, 32)}).view(at::kByte),
                wide.t()));
}

// e4m3 codes with exponents as scales.
TEST(Dequantized, IsWhatMxFp8Says) {
  const Codes codes = quantized(waves({5, 80}, 0.3, 300.0), {0, 0});
  const at::Tensor scales = (at::arange(15, at::kInt).view({5, 3}) + 120).to(at::kByte);
  const QuantizedWeight weight{.recipe = WeightRecipe::kMxFp8,
                               .codes = codes.bytes.view(at::kFloat8_e4m3fn),
                               .scales = scales};
  const at::Tensor expected =
      codes.numbers *
      at::pow(2.0, scales.to(at::kDouble) - 127.0).repeat_interleave(32, 1).narrow(1, 0, 80);
  EXPECT_TRUE(at::equal(dequantized(weight, at::kFloat), expected.to(at::kFloat)));
}

// One number that is not finite makes its block NaN, and no other block.
TEST(Dequantized, OfABlockWithInfIsNaN) {
  for (const float bad : {INFINITY, -INFINITY}) {
    at::Tensor x = waves({3, 64}, 0.3, 2.0);
    x[1][35] = bad;
    at::Tensor codes = at::empty({3, 64}, at::kByte);
    at::Tensor scales = at::empty({3, 2}, at::kByte);
    QuantizeCounts counts;
    quantize_on_host({.values = x.data_ptr<float>(), .range = {0, 192}, .rows = 3, .columns = 64},
                     WeightRecipe::kMxFp8, nullptr,
                     {codes.data_ptr<uint8_t>(), scales.data_ptr<uint8_t>(), &counts});
    const testing::ReferenceCodes expected = testing::quantized_by_loop(x, WeightRecipe::kMxFp8);
    EXPECT_TRUE(at::equal(codes, expected.codes));
    EXPECT_TRUE(at::equal(scales, expected.scales));
    const at::Tensor numbers = dequantized(
        {.recipe = WeightRecipe::kMxFp8, .codes = codes.view(at::kFloat8_e4m3fn), .scales = scales},
        at::kFloat);
    at::Tensor is_nan = at::zeros({3, 64}, at::kBool);
    is_nan[1].narrow(0, 32, 32).fill_(true);
    EXPECT_TRUE(at::equal(numbers.isnan(), is_nan));
    EXPECT_EQ(counts.overflows, 32);
  }
}

}  // namespace
}  // namespace fsdp::nn::quantized_rows_test
