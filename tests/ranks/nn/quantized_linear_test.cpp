// Layers whose weights are codes and scales against plain formulas of the definition in fp64.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <functional>
#include <limits>
#include <string>
#include <tuple>

#include "fsdp/base/block_scale.h"
#include "fsdp/base/text.h"
#include "fsdp/comm/mesh.h"
#include "fsdp/nn/layers/dequantized.h"
#include "fsdp/nn/layers/experts.h"
#include "fsdp/nn/layers/gathered_linear.h"
#include "fsdp/nn/layers/grouped_linear.h"
#include "fsdp/nn/layers/linear.h"
#include "fsdp/nn/layers/quantized_rows.h"
#include "fsdp/shard/group/quantized_parameter.h"
#include "support/layer_gradients.h"
#include "support/run_ranks.h"

namespace fsdp::nn::quantized_linear_test {
namespace {

using fsdp::testing::run_ranks;
using fsdp::testing::waves;
using Tensors = std::vector<at::Tensor>;

// --- the definition ------------------------------------------------------------------------------

int64_t ceil_of(int64_t count, int64_t size) { return (count + size - 1) / size; }

// Blocks of [rows, columns] numbers; 0: all of them.
struct Block {
  int64_t rows = 0;
  int64_t columns = 0;
};

struct Codes {
  at::Tensor bytes;    // of the codes
  at::Tensor scales;   // one per block
  at::Tensor values;   // what they say, in fp64
  at::Tensor numbers;  // the codes alone, in fp64
};

Codes quantized(const at::Tensor& numbers, Block block) {
  const at::Tensor x = numbers.to(at::kFloat).contiguous();
  const int64_t height = block.rows == 0 ? x.size(0) : block.rows;
  const int64_t width = block.columns == 0 ? x.size(1) : block.columns;
  Codes result{at::empty(x.sizes(), at::kByte),
               at::empty({ceil_of(x.size(0), height), ceil_of(x.size(1), width)}),
               at::empty(x.sizes(), at::kDouble), at::empty(x.sizes(), at::kDouble)};
  const auto from = x.accessor<float, 2>();
  auto bytes = result.bytes.accessor<uint8_t, 2>();
  auto scales = result.scales.accessor<float, 2>();
  auto values = result.values.accessor<double, 2>();
  auto codes = result.numbers.accessor<double, 2>();
  for (int64_t i = 0; i < x.size(0); i += height) {
    for (int64_t j = 0; j < x.size(1); j += width) {
      const int64_t last_row = std::min(i + height, x.size(0));
      const int64_t last_column = std::min(j + width, x.size(1));
      float amax = 0.0f;
      for (int64_t r = i; r < last_row; ++r)
        for (int64_t c = j; c < last_column; ++c) {
          if (std::isnan(amax)) continue;
          amax = std::isnan(from[r][c]) ? from[r][c] : std::max(amax, std::fabs(from[r][c]));
        }
      const float factor = fp8_factor(std::fabs(amax));
      const float scale = scales[i / height][j / width] = fp8_scale(factor);
      for (int64_t r = i; r < last_row; ++r)
        for (int64_t c = j; c < last_column; ++c) {
          bytes[r][c] = fp8_code(from[r][c], factor);
          codes[r][c] = Fp8E4M3::widened(bytes[r][c]);
          values[r][c] = codes[r][c] * static_cast<double>(scale);
        }
    }
  }
  return result;
}

Block block_of(ScaleBlock block) {
  if (block == ScaleBlock::kMatrix) return {};
  return block == ScaleBlock::kRow ? Block{1, 0} : Block{1, kScalePiece};
}

// --- rows ----------------------------------------------------------------------------------------

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
  // As bits: NaNs are equal.
  EXPECT_TRUE(at::equal(actual.scales.contiguous().view(at::kInt), expected.scales.view(at::kInt)))
      << what << "\n"
      << actual.scales << "\n"
      << expected.scales;
}

TEST(QuantizedRows, AreCodesAndScalesOfTheDefinition) {
  for (const ScaleBlock block : {ScaleBlock::kMatrix, ScaleBlock::kRow, ScaleBlock::kPiece}) {
    for (const int64_t columns : {16, 128, 300}) {
      for (const at::ScalarType type : {at::kFloat, at::kBFloat16, at::kHalf}) {
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

TEST(QuantizedRows, MultiplyNumbersFirst) {
  const at::Tensor x = waves({40, 160}, 0.2).to(at::kBFloat16);
  const at::Tensor by_column = waves({160}, 0.7, 3.0);
  const at::Tensor by_row = waves({40}, 0.9, 0.01);
  for (const ScaleBlock block : {ScaleBlock::kRow, ScaleBlock::kPiece}) {
    const Codes rows = quantized(x.to(at::kFloat) * by_column, block_of(block));
    const Codes columns = quantized((x.to(at::kFloat) * by_row.unsqueeze(1)).t(), block_of(block));
    expect_codes(quantize_rows(x, block, by_column), rows, "rows");
    expect_codes(quantize_columns(x, block, by_row), columns, "columns");
    const TwoForms both = quantize_two_forms(x, block, by_column, by_row);
    expect_codes(both.by_rows, rows, "rows of both");
    expect_codes(both.by_columns, columns, "columns of both");
  }
}

TEST(QuantizedRows, AreTransposedWithZerosAtTheEnd) {
  const at::Tensor codes = at::arange(35, at::kByte).view({5, 7}).view(at::kFloat8_e4m3fn);
  const at::Tensor turned = transposed_codes(codes).view(at::kByte);
  EXPECT_EQ(turned.sizes(), (at::IntArrayRef{7, 16}));
  EXPECT_TRUE(at::equal(turned.narrow(1, 0, 5), codes.view(at::kByte).t()));
  EXPECT_FALSE(turned.narrow(1, 5, 11).any().item<bool>());
}

// --- layers --------------------------------------------------------------------------------------

struct Recipe {
  WeightRecipe recipe = WeightRecipe::kFp8Row;
  ProductType weight_gradient = ProductType::kQuantized;
};

std::string to_text(const Recipe& recipe) {
  return concat(row_of(recipe.recipe).name,
                recipe.weight_gradient == ProductType::kPlain ? ", plain weight gradient" : "");
}

std::vector<Recipe> code_recipes() {
  std::vector<Recipe> recipes;
  for (const WeightRecipe recipe :
       {WeightRecipe::kFp8Tensor, WeightRecipe::kFp8Row, WeightRecipe::kFp8Block})
    for (const ProductType type : {ProductType::kQuantized, ProductType::kPlain})
      recipes.push_back({recipe, type});
  return recipes;
}

Codes weight_codes(const at::Tensor& numbers, WeightRecipe recipe) {
  const WeightRecipeRow& row = row_of(recipe);
  return quantized(numbers, {row.scale_rows, row.scale_columns});
}

// A parameter without numbers: whoever reads it gets NaN. Codes lie elsewhere at every call.
at::Tensor tagged(const at::Tensor& numbers, const Recipe& recipe, at::ScalarType type) {
  const Codes codes = weight_codes(numbers, recipe.recipe);
  const at::Tensor parameter = at::full(numbers.sizes(), NAN, type).set_requires_grad(true);
  tag_quantized(parameter, [=] {
    return QuantizedWeight{.recipe = recipe.recipe,
                           .codes = codes.bytes.clone().view(at::kFloat8_e4m3fn),
                           .scales = codes.scales.clone(),
                           .matrix_scale = {},
                           .weight_gradient = recipe.weight_gradient};
  });
  return parameter;
}

// Output and gradients by the definition, of X: [tokens, in] and dY: [tokens, out].
struct Expected {
  at::Tensor output;
  at::Tensor of_input;
  at::Tensor of_weight;
};

Expected expected_of(const at::Tensor& x, const at::Tensor& w, const at::Tensor& dy,
                     const Recipe& recipe) {
  const Codes weight = weight_codes(w, recipe.recipe);
  const at::Tensor g = dy.to(at::kFloat);
  Expected result;
  if (recipe.recipe == WeightRecipe::kFp8Tensor) {
    const at::Tensor qx = quantized(x, {}).values;
    const at::Tensor qg = quantized(g, {}).values;
    result = {qx.mm(weight.values.t()), qg.mm(weight.values), qg.t().mm(qx)};
  } else if (recipe.recipe == WeightRecipe::kFp8Row) {
    const Codes qx = quantized(x, {1, 0});
    result = {qx.values.mm(weight.values.t()),
              quantized(g * weight.scales.t(), {1, 0}).values.mm(weight.numbers),
              quantized((g * qx.scales).t(), {1, 0}).values.mm(qx.numbers)};
  } else {
    result = {quantized(x, {1, 128}).values.mm(weight.values.t()),
              quantized(g, {1, 128}).values.mm(weight.values),
              quantized(g.t(), {1, 128}).values.mm(quantized(x.t(), {1, 128}).values.t())};
  }
  if (recipe.weight_gradient == ProductType::kPlain)
    result.of_weight = g.t().to(at::kDouble).mm(x.to(at::kDouble));
  return result;
}

// Sums of fp32 in another order, and one rounding; relative to the largest number.
void expect_rounded(const at::Tensor& actual, const at::Tensor& expected, const std::string& what) {
  ASSERT_TRUE(actual.defined()) << what;
  const double half_unit = actual.scalar_type() == at::kFloat ? 0.0 : 0x1p-8;
  const at::Tensor error = (actual.to(at::kDouble) - expected.view(actual.sizes())).abs();
  const at::Tensor bound =
      expected.view(actual.sizes()).abs() * half_unit + 1e-6 * expected.abs().max().item<double>();
  EXPECT_TRUE(error.le(bound).all().item<bool>()) << what << ": " << error.max().item<double>()
                                                  << " of " << expected.abs().max().item<double>();
}

struct Shape {
  int64_t tokens;
  int64_t in;
  int64_t out;
};

void expect_definition(const Recipe& recipe, const Shape& shape, at::ScalarType type) {
  const std::string what = concat(to_text(recipe), ", ", shape.tokens, " tokens");
  const at::Tensor x = waves({2, shape.tokens / 2, shape.in}, 0.1, 2.0).to(type);
  const at::Tensor w = waves({shape.out, shape.in}, 0.5, 0.02);
  const at::Tensor dy = waves({2, shape.tokens / 2, shape.out}, 0.8, 1e-3).to(type);
  const at::Tensor input = x.clone().set_requires_grad(true);
  const at::Tensor weight = tagged(w, recipe, type);
  const at::Tensor bias = waves({shape.out}, 0.9).to(type).set_requires_grad(true);
  const at::Tensor output = linear(input, weight, bias);
  EXPECT_EQ(output.scalar_type(), type);
  output.backward(dy);
  const at::Tensor rows = dy.view({-1, shape.out});
  const Expected expected = expected_of(x.view({-1, shape.in}), w, rows, recipe);
  expect_rounded(output, expected.output + bias.detach().to(at::kDouble), what + ": output");
  expect_rounded(input.grad(), expected.of_input, what + ": gradient of the input");
  expect_rounded(weight.grad(), expected.of_weight, what + ": gradient of the weight");
  EXPECT_TRUE(at::equal(bias.grad(), rows.sum(0))) << what;
  EXPECT_TRUE(weight.isnan().all().item<bool>()) << what;
}

TEST(QuantizedLinear, EqualsItsDefinition) {
  for (const Recipe& recipe : code_recipes())
    for (const at::ScalarType type : {at::kFloat, at::kBFloat16})
      for (const int64_t tokens : {32, 160}) expect_definition(recipe, {tokens, 256, 384}, type);
}

// Sums over tokens are padded with zeros.
TEST(QuantizedLinear, HasAnyNumberOfTokensUnderScalesOfRowsAndMatrices) {
  for (const Recipe& recipe : code_recipes())
    if (recipe.recipe != WeightRecipe::kFp8Block)
      for (const int64_t tokens : {2, 30, 34})
        expect_definition(recipe, {tokens, 48, 32}, at::kFloat);
}

// As with the weight's numbers.
void expect_numbers_used(const Recipe& recipe, const Shape& shape) {
  const std::string what = to_text(recipe);
  const at::Tensor w = waves({shape.out, shape.in}, 0.5, 0.02);
  const at::Tensor weight = tagged(w, recipe, at::kFloat);
  const at::Tensor plain =
      weight_codes(w, recipe.recipe).values.to(at::kFloat).set_requires_grad(true);
  Tensors results;
  for (const at::Tensor& each : {weight, plain}) {
    const at::Tensor input = waves({shape.tokens, shape.in}, 0.1).set_requires_grad(true);
    const at::Tensor output = linear(input, each, at::Tensor());
    output.backward(waves(output.sizes(), 0.8));
    results.insert(results.end(), {output.detach(), input.grad(), each.grad()});
  }
  for (size_t i = 0; i < 3; ++i)
    EXPECT_TRUE(at::equal(results[i], results[i + 3])) << what << ", result " << i;
}

TEST(QuantizedLinear, UsesNumbersWhereADeviceHasNoProductOfCodes) {
  for (const Recipe& recipe : code_recipes()) {
    expect_numbers_used(recipe, {8, 40, 32});
    expect_numbers_used(recipe, {8, 32, 40});
    expect_numbers_used(recipe, {0, 32, 32});
  }
  const Recipe blocks{WeightRecipe::kFp8Block, ProductType::kQuantized};
  expect_numbers_used(blocks, {16, 128, 144});
  expect_numbers_used(blocks, {8, 128, 128});
}

// e4m3 codes with exponents as scales.
TEST(QuantizedLinear, DequantizesMxFp8) {
  const Codes codes = quantized(waves({5, 80}, 0.3, 300.0), {0, 0});
  const at::Tensor scales = (at::arange(15, at::kInt).view({5, 3}) + 120).to(at::kByte);
  const QuantizedWeight weight{.recipe = WeightRecipe::kMxFp8,
                               .codes = codes.bytes.view(at::kFloat8_e4m3fn),
                               .scales = scales,
                               .matrix_scale = {}};
  const at::Tensor expected =
      codes.numbers *
      at::pow(2.0, scales.to(at::kDouble) - 127.0).repeat_interleave(32, 1).narrow(1, 0, 80);
  EXPECT_TRUE(at::equal(dequantized(weight, at::kFloat), expected.to(at::kFloat)));
}

TEST(QuantizedLinear, DequantizesNvFp4) {
  const double magnitudes[] = {0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0};
  const at::Tensor bytes =
      (at::arange(3 * 24, at::kInt) * 37).remainder(256).to(at::kByte).view({3, 24});
  const Codes scales = quantized(waves({3, 3}, 0.4, 100.0).abs(), {});
  const QuantizedWeight weight{.recipe = WeightRecipe::kNvFp4,
                               .codes = bytes,
                               .scales = scales.bytes,
                               .matrix_scale = at::full({1}, 0.25f)};
  const at::Tensor actual = dequantized(weight, at::kFloat);
  ASSERT_EQ(actual.sizes(), (at::IntArrayRef{3, 48}));
  for (int64_t i = 0; i < 3; ++i)
    for (int64_t j = 0; j < 48; ++j) {
      const int code = bytes[i][j / 2].item<int>() >> (j % 2 * 4) & 15;
      const double sign = code >= 8 ? -1.0 : 1.0;
      const double scale = scales.numbers[i][j / 16].item<double>() * 0.25;
      EXPECT_EQ(actual[i][j].item<double>(), sign * magnitudes[code % 8] * scale) << i << ", " << j;
    }
}

// --- several weights -----------------------------------------------------------------------------

Tensors results_of(const at::Tensor& input, const Tensors& weights, const Tensors& outputs) {
  at::Tensor sum = at::zeros({});
  for (size_t i = 0; i < outputs.size(); ++i)
    sum = sum + (outputs[i] * waves(outputs[i].sizes(), 0.4 + static_cast<double>(i))).sum();
  sum.backward();
  Tensors results = {input.grad().clone()};
  for (const at::Tensor& output : outputs) results.push_back(output.detach());
  for (const at::Tensor& weight : weights) {
    results.push_back(weight.grad().clone());
    weight.mutable_grad() = at::Tensor();
  }
  input.mutable_grad() = at::Tensor();
  return results;
}

TEST(QuantizedLinear, OfSeveralWeightsEqualsEachByItself) {
  for (const Recipe& recipe : code_recipes()) {
    const at::Tensor input = waves({2, 16, 128}, 0.1).set_requires_grad(true);
    // One has a shape without products of codes, one is not quantised.
    const Tensors weights = {tagged(waves({128, 128}, 0.2), recipe, at::kFloat),
                             tagged(waves({256, 128}, 0.3), recipe, at::kFloat),
                             tagged(waves({40, 128}, 0.4), recipe, at::kFloat),
                             waves({24, 128}, 0.5).set_requires_grad(true)};
    const Tensors biases = {at::Tensor(), waves({256}, 0.6), at::Tensor(), waves({24}, 0.7)};
    const Tensors together = results_of(input, weights, linear(input, weights, biases));
    Tensors outputs;
    for (size_t i = 0; i < weights.size(); ++i)
      outputs.push_back(linear(input, weights[i], biases[i]));
    const Tensors alone = results_of(input, weights, outputs);
    EXPECT_TRUE(at::allclose(together[0], alone[0], 1e-5, 1e-5)) << to_text(recipe);
    for (size_t i = 1; i < together.size(); ++i)
      EXPECT_TRUE(at::equal(together[i], alone[i])) << to_text(recipe) << ", result " << i;
  }
}

// Codes, of one byte, take the place of the input wherever they are enough for the backward.
TEST(QuantizedLinear, KeepsTheInputOnlyWhereCodesAreNotEnough) {
  for (const Recipe& recipe : code_recipes()) {
    const at::Tensor leaf = waves({16, 128}, 0.1).set_requires_grad(true);
    at::Tensor input = leaf + 1.0;
    const c10::weak_intrusive_ptr<c10::TensorImpl> watched(input.getIntrusivePtr());
    const at::Tensor weight = tagged(waves({128, 128}, 0.2), recipe, at::kFloat);
    const at::Tensor output = linear(input, weight, at::Tensor());
    input.reset();
    const bool is_needed =
        recipe.recipe == WeightRecipe::kFp8Block || recipe.weight_gradient == ProductType::kPlain;
    EXPECT_EQ(!watched.expired(), is_needed) << to_text(recipe);
    output.sum().backward();
    EXPECT_TRUE(weight.grad().isfinite().all().item<bool>()) << to_text(recipe);
  }
}

TEST(QuantizedLinear, WithoutTrainedWeightsHasTheInputsGradient) {
  const Recipe recipe;
  const at::Tensor weight =
      tagged(waves({32, 48}, 0.2), recipe, at::kFloat).set_requires_grad(false);
  const at::Tensor input = waves({16, 48}, 0.1).set_requires_grad(true);
  const at::Tensor output = linear(input, weight, at::Tensor());
  const at::Tensor dy = waves({16, 32}, 0.3);
  output.backward(dy);
  expect_rounded(input.grad(),
                 expected_of(input.detach(), waves({32, 48}, 0.2), dy, recipe).of_input, "input");
  EXPECT_FALSE(weight.grad().defined());
}

TEST(QuantizedLinear, IsOfAModuleThatSaysSo) {
  EXPECT_TRUE(Linear(4, 4)->is_quantizable("weight"));
  EXPECT_FALSE(Linear(4, 4)->is_quantizable("bias"));
  EXPECT_TRUE(Projection(ProjectionOptions{4, 4})->is_quantizable("weight"));
  Linear layer(48, 32);
  const Recipe recipe;
  layer->weight = tagged(waves({32, 48}, 0.2), recipe, at::kFloat);
  EXPECT_TRUE(layer(waves({16, 48}, 0.1)).isfinite().all().item<bool>());
}

// --- ranks and experts ---------------------------------------------------------------------------

TEST(QuantizedGatheredLinear, EqualsThatOfTheWholeSequence) {
  for (const Recipe& recipe : code_recipes()) {
    run_ranks(2, [&](World& world) {
      const Mesh mesh = world.mesh({.tp = 2});
      const MeshAxis& tp = *mesh.tp();
      const at::Tensor whole = waves({2, 32, 128}, 0.1).set_requires_grad(true);
      const at::Tensor own =
          whole.detach().narrow(1, 16 * tp.rank(), 16).clone().set_requires_grad(true);
      // The ranks have the same outputs: the gradient of their tokens is twice that of one.
      const Tensors weights = {tagged(waves({128, 128}, 0.2), recipe, at::kFloat),
                               tagged(waves({256, 128}, 0.3), recipe, at::kFloat)};
      const Tensors biases = {waves({128}, 0.6), waves({256}, 0.7)};
      const Tensors expected = results_of(whole, weights, linear(whole, weights, biases));
      const Tensors actual = results_of(own, weights, gathered_linear(own, weights, biases, tp));
      EXPECT_TRUE(
          at::allclose(actual[0], expected[0].narrow(1, 16 * tp.rank(), 16) * 2.0, 1e-5, 1e-4))
          << to_text(recipe);
      for (size_t i = 1; i < actual.size(); ++i)
        EXPECT_TRUE(at::equal(actual[i], expected[i])) << to_text(recipe) << ", result " << i;
    });
  }
}

TEST(QuantizedGroupedLinear, UsesTheNumbersOfItsCodes) {
  for (const Recipe& recipe : code_recipes()) {
    const at::Tensor w = waves({3 * 32, 48}, 0.2, 0.1);
    const at::Tensor weight = tagged(w, recipe, at::kFloat);
    const at::Tensor plain =
        weight_codes(w, recipe.recipe).values.to(at::kFloat).set_requires_grad(true);
    Tensors results;
    for (const at::Tensor& each : {weight, plain}) {
      const at::Tensor rows = waves({20, 48}, 0.1).set_requires_grad(true);
      const at::Tensor ends = at::tensor({7, 7, 20}, at::kInt);
      const at::Tensor output = grouped_linear(rows, each, row_groups(rows, ends, {48, 32}));
      output.backward(waves(output.sizes(), 0.8));
      results.insert(results.end(), {output.detach(), rows.grad(), each.grad()});
    }
    for (size_t i = 0; i < 3; ++i)
      EXPECT_TRUE(at::equal(results[i], results[i + 3])) << to_text(recipe) << ", result " << i;
  }
}

}  // namespace
}  // namespace fsdp::nn::quantized_linear_test
