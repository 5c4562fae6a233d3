// Quantised linear layers on a device against those on a CPU, whose numbers are tested against
// their definition: codes and scales bit for bit, products within the device's sums.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "fsdp/base/text.h"
#include "fsdp/nn/kernels/layer_kernels.h"
#include "fsdp/nn/layers/linear.h"
#include "fsdp/nn/layers/quantized_rows.h"
#include "fsdp/shard/group/quantized_weights.h"
#include "support/layer_gradients.h"
#include "support/require.h"

#define FSDP_REQUIRE_DEVICE_LAYERS() \
  FSDP_REQUIRE_GPU();                \
  if (!has_device_layers()) GTEST_SKIP() << "built without CUDA kernels"

namespace fsdp::nn::quantized_device_test {
namespace {

using fsdp::testing::waves;
using Tensors = std::vector<at::Tensor>;

constexpr ScaleBlock kBlocks[] = {ScaleBlock::kMatrix, ScaleBlock::kRow, ScaleBlock::kPiece};

// --- codes ---------------------------------------------------------------------------------------

void expect_same(const QuantizedRows& on_device, const QuantizedRows& on_host,
                 const std::string& what) {
  EXPECT_TRUE(at::equal(on_device.codes.view(at::kByte).cpu(), on_host.codes.view(at::kByte)))
      << what << ": codes";
  // Compares bits, so that NaNs are equal.
  EXPECT_TRUE(at::equal(on_device.scales.cpu().contiguous().view(at::kInt),
                        on_host.scales.contiguous().view(at::kInt)))
      << what << ": scales";
}

void expect_same_forms(const at::Tensor& x, ScaleBlock block, const std::string& what) {
  const at::Tensor there = x.cuda();
  const bool multiplies = block != ScaleBlock::kMatrix;
  const at::Tensor by_column = multiplies ? waves({x.size(1)}, 0.7, 3.0) : at::Tensor();
  const at::Tensor by_row = multiplies ? waves({x.size(0)}, 0.9, 0.01) : at::Tensor();
  const auto cuda = [](const at::Tensor& tensor) {
    return tensor.defined() ? tensor.cuda() : tensor;
  };
  const QuantizedRows rows = quantize_rows(x, block, by_column);
  const QuantizedRows columns = quantize_columns(x, block, by_row);
  expect_same(quantize_rows(there, block), quantize_rows(x, block), what);
  expect_same(quantize_rows(there, block, cuda(by_column)), rows, what);
  expect_same(quantize_columns(there, block, cuda(by_row)), columns, what);
  const TwoForms both = quantize_two_forms({{there, cuda(by_column)}}, block, cuda(by_row));
  expect_same(both.by_rows, rows, what);
  expect_same(both.by_columns.front(), columns, what);
}

// Three of them, with and without the other form.
void expect_same_side_by_side(const at::Tensor& x, ScaleBlock block, const std::string& what) {
  const at::Tensor by_column = waves({x.size(1)}, 0.7, 3.0);
  const at::Tensor by_row = waves({x.size(0)}, 0.9, 0.01);
  const int64_t cuts[] = {0, 128, x.size(1) - 128, x.size(1)};
  std::vector<MultipliedColumns> here;
  std::vector<MultipliedColumns> there;
  for (size_t i = 0; i + 1 < std::size(cuts); ++i) {
    const int64_t count = cuts[i + 1] - cuts[i];
    here.push_back({x.narrow(1, cuts[i], count), by_column.narrow(0, cuts[i], count)});
    there.push_back({here.back().numbers.cuda(), here.back().multipliers.cuda()});
  }
  const TwoForms expected = quantize_two_forms(here, block, by_row);
  expect_same(quantize_rows(there, block), expected.by_rows, what);
  const TwoForms actual = quantize_two_forms(there, block, by_row.cuda());
  expect_same(actual.by_rows, expected.by_rows, what);
  for (size_t i = 0; i < here.size(); ++i)
    expect_same(actual.by_columns[i], expected.by_columns[i], concat(what, ", matrix ", i));
}

TEST(QuantizedRowsOnDevice, HaveTheBitsOfAHost) {
  FSDP_REQUIRE_DEVICE_LAYERS();
  for (const ScaleBlock block : kBlocks)
    for (const at::ScalarType type : {at::kFloat, at::kBFloat16, at::kHalf})
      for (const int64_t rows : {1, 100, 144, 1000})
        for (const int64_t columns : {16, 128, 400, 1024, 5632})
          expect_same_forms(waves({rows, columns}, 0.2, 5.0).to(type), block,
                            concat(static_cast<int>(block), ", ", rows, " x ", columns));
  for (const ScaleBlock block : {ScaleBlock::kRow, ScaleBlock::kPiece})
    for (const int64_t rows : {100, 1000})
      for (const int64_t columns : {384, 2560})
        expect_same_side_by_side(waves({rows, columns}, 0.2, 5.0).to(at::kBFloat16), block,
                                 concat(rows, " x ", columns, " side by side"));
  // Read twice.
  expect_same_forms(waves({3, 65536}, 0.2), ScaleBlock::kRow, "long rows");
}

TEST(QuantizedRowsOnDevice, HaveTheBitsOfAHostForAwkwardNumbers) {
  FSDP_REQUIRE_DEVICE_LAYERS();
  const at::Tensor x = waves({300, 256}, 0.2);
  x[0].zero_();
  x[1].mul_(1e-14);
  x[2].mul_(1e-40);
  x[3].mul_(at::logspace(-20, 20, 256));
  x[4].mul_(3.3e38);
  for (const ScaleBlock block : kBlocks) expect_same_forms(x, block, "finite");
  x[5][1] = std::numeric_limits<float>::quiet_NaN();
  x[5][2] = -std::numeric_limits<float>::quiet_NaN();
  x[6][2] = std::numeric_limits<float>::infinity();
  x[7][3] = -std::numeric_limits<float>::infinity();
  for (const ScaleBlock block : kBlocks) expect_same_forms(x, block, "not finite");
}

TEST(QuantizedRowsOnDevice, AreTransposed) {
  FSDP_REQUIRE_DEVICE_LAYERS();
  for (const int64_t rows : {1, 128, 130, 1000})
    for (const int64_t columns : {16, 128, 144, 2048}) {
      const at::Tensor codes = at::randint(256, {rows, columns}).to(at::kByte);
      const at::Tensor there = codes.cuda().view(at::kFloat8_e4m3fn);
      EXPECT_TRUE(at::equal(transposed_codes(there).view(at::kByte).cpu(),
                            transposed_codes(codes.view(at::kFloat8_e4m3fn)).view(at::kByte)))
          << rows << " x " << columns;
    }
  const at::Tensor codes = at::randint(256, {480, 144}).to(at::kByte).view(at::kFloat8_e4m3fn);
  const at::Tensor there = codes.cuda();
  EXPECT_TRUE(at::equal(
      transposed_codes({there.narrow(0, 0, 144), there.narrow(0, 144, 336)}).view(at::kByte).cpu(),
      transposed_codes(codes).view(at::kByte)));
}

// --- layers --------------------------------------------------------------------------------------

// [out / 128, in / 128] scales: rows of one block's numbers each, and back.
QuantizedRows squares_of(const at::Tensor& numbers) {
  const int64_t down = numbers.size(0) / kScalePiece;
  const int64_t across = numbers.size(1) / kScalePiece;
  const at::Tensor blocks = numbers.view({down, kScalePiece, across, kScalePiece})
                                .permute({0, 2, 1, 3})
                                .reshape({down * across, kScalePiece * kScalePiece});
  const QuantizedRows rows = quantize_rows(blocks, ScaleBlock::kRow);
  const at::Tensor codes = rows.codes.view(at::kByte)
                               .view({down, across, kScalePiece, kScalePiece})
                               .permute({0, 2, 1, 3})
                               .reshape(numbers.sizes());
  return {ScaleBlock::kSquare, codes.view(at::kFloat8_e4m3fn), rows.scales.view({down, across})};
}

struct Recipe {
  WeightRecipe recipe;
  ProductForm weight_gradient;
};

QuantizedRows codes_of(const at::Tensor& numbers, WeightRecipe recipe) {
  if (recipe == WeightRecipe::kFp8Block) return squares_of(numbers);
  return quantize_rows(numbers,
                       recipe == WeightRecipe::kFp8Row ? ScaleBlock::kRow : ScaleBlock::kMatrix);
}

at::Tensor tagged(const at::Tensor& numbers, const Recipe& recipe, const at::Device& device) {
  const QuantizedRows rows = codes_of(numbers, recipe.recipe);
  const at::Tensor codes = rows.codes.to(device);
  const at::Tensor scales = rows.scales.to(device);
  const at::Tensor parameter =
      at::full(numbers.sizes(), NAN, at::TensorOptions().device(device).dtype(at::kBFloat16))
          .set_requires_grad(true);
  tag_quantized(parameter, [=] {
    return QuantizedWeight{.recipe = recipe.recipe,
                           .codes = codes,
                           .scales = scales,
                           .weight_gradient = recipe.weight_gradient};
  });
  return parameter;
}

// Outputs and gradients of two weights, one with a bias.
Tensors results_on(const at::Device& device, const Recipe& recipe, int64_t tokens) {
  const auto there = [&](const at::Tensor& tensor) {
    return tensor.to(at::kBFloat16).to(device).set_requires_grad(true);
  };
  const at::Tensor input = there(waves({2, tokens / 2, 512}, 0.1, 2.0));
  const Tensors weights = {tagged(waves({384, 512}, 0.2, 0.02), recipe, device),
                           tagged(waves({640, 512}, 0.3, 0.02), recipe, device)};
  const at::Tensor bias = there(waves({640}, 0.4));
  const Tensors outputs = linear(input, weights, {at::Tensor(), bias});
  at::Tensor sum = at::zeros({}, input.options());
  for (size_t i = 0; i < outputs.size(); ++i)
    sum = sum + (outputs[i] * there(waves(outputs[i].sizes(), 0.5)).detach()).sum();
  sum.backward();
  Tensors results = {outputs[0].detach(), outputs[1].detach(), input.grad(),
                     weights[0].grad(),   weights[1].grad(),   bias.grad()};
  for (at::Tensor& result : results) result = result.to(at::kDouble).cpu();
  return results;
}

TEST(QuantizedLinearOnDevice, EqualsThatOfAHost) {
  FSDP_REQUIRE_DEVICE_LAYERS();
  for (const WeightRecipe recipe :
       {WeightRecipe::kFp8Tensor, WeightRecipe::kFp8Row, WeightRecipe::kFp8Block})
    for (const ProductForm type : {ProductForm::kQuantized, ProductForm::kPlain})
      for (const int64_t tokens : {256, 144, 50}) {
        const Tensors actual = results_on(at::kCUDA, {recipe, type}, tokens);
        const Tensors expected = results_on(at::kCPU, {recipe, type}, tokens);
        for (size_t i = 0; i < actual.size(); ++i) {
          const double largest = expected[i].abs().max().item<double>();
          const double error = (actual[i] - expected[i]).abs().max().item<double>();
          // Two roundings to bf16 that may differ by a unit, and sums of 14 bits.
          EXPECT_LT(error, 0.012 * largest)
              << row_of(recipe).name << ", " << tokens << " tokens, result " << i;
        }
      }
}

}  // namespace
}  // namespace fsdp::nn::quantized_device_test
