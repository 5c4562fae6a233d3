// Layers whose weights are codes and scales against plain formulas of the definition in fp64.
#include <gtest/gtest.h>

#include <string>

#include "fsdp/comm/mesh.h"
#include "fsdp/nn/layers/experts.h"
#include "fsdp/nn/layers/linear.h"
#include "fsdp/nn/layers/linear_functions.h"
#include "fsdp/shard/fully_shard.h"
#include "fsdp/shard/unit.h"
#include "support/layer_gradients.h"
#include "support/quantized_weights.h"
#include "support/run_ranks.h"
#include "support/watched_memory.h"

namespace fsdp::nn::quantized_linear_test {
namespace {

using namespace fsdp::testing::of_codes;
using fsdp::testing::run_ranks;
using fsdp::testing::waves;
using Tensors = std::vector<at::Tensor>;

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
  if (recipe.weight_gradient == ProductForm::kPlain)
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

// Results are those of the weight's numbers. `apply`: rows and weight to an output.
template <typename Apply>
void expect_numbers_used(const Recipe& recipe, const Shape& shape, const Apply& apply) {
  const at::Tensor w = waves({shape.out, shape.in}, 0.5, 0.02);
  const at::Tensor plain =
      weight_codes(w, recipe.recipe).values.to(at::kFloat).set_requires_grad(true);
  Tensors results;
  for (const at::Tensor& each : {tagged(w, recipe, at::kFloat), plain}) {
    const at::Tensor input = waves({shape.tokens, shape.in}, 0.1).set_requires_grad(true);
    const at::Tensor output = apply(input, each);
    output.backward(waves(output.sizes(), 0.8));
    results.insert(results.end(), {output.detach(), input.grad(), each.grad()});
  }
  for (size_t i = 0; i < 3; ++i)
    EXPECT_TRUE(at::equal(results[i], results[i + 3])) << to_text(recipe) << ", result " << i;
}

TEST(QuantizedLinear, UsesNumbersWhereADeviceHasNoProductOfCodes) {
  const auto apply = [](const at::Tensor& input, const at::Tensor& weight) {
    return linear(input, weight, at::Tensor());
  };
  for (const Recipe& recipe : code_recipes())
    for (const Shape& shape : {Shape{8, 40, 32}, {8, 32, 40}, {0, 32, 32}})
      expect_numbers_used(recipe, shape, apply);
  const Recipe blocks{WeightRecipe::kFp8Block, ProductForm::kQuantized};
  expect_numbers_used(blocks, {16, 128, 144}, apply);
  expect_numbers_used(blocks, {8, 128, 128}, apply);
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
    // Scales of rows are those of all quantised gradients together (next test).
    EXPECT_TRUE(recipe.recipe == WeightRecipe::kFp8Row ||
                at::allclose(together[0], alone[0], 1e-5, 1e-5))
        << to_text(recipe);
    for (size_t i = 1; i < together.size(); ++i)
      EXPECT_TRUE(at::equal(together[i], alone[i])) << to_text(recipe) << ", result " << i;
  }
}

TEST(QuantizedLinear, GradientsOfOneInputHaveOneScalePerToken) {
  const Recipe recipe;
  const Tensors numbers = {waves({128, 64}, 0.2, 0.02), waves({48, 64}, 0.3, 0.5)};
  const Tensors gradients = {waves({32, 128}, 0.4), waves({32, 48}, 0.5, 1e-3)};
  for (const bool trains : {true, false}) {
    const at::Tensor input = waves({32, 64}, 0.1).set_requires_grad(true);
    Tensors weights;
    for (const at::Tensor& each : numbers)
      weights.push_back(tagged(each, recipe, at::kFloat).set_requires_grad(trains));
    const Tensors outputs = linear(input, weights, Tensors(2));
    ((outputs[0] * gradients[0]).sum() + (outputs[1] * gradients[1]).sum()).backward();
    const Codes first = weight_codes(numbers[0], recipe.recipe);
    const Codes second = weight_codes(numbers[1], recipe.recipe);
    const at::Tensor beside =
        at::cat({gradients[0] * first.scales.t(), gradients[1] * second.scales.t()}, 1);
    expect_rounded(input.grad(),
                   quantized(beside, {1, 0}).values.mm(at::cat({first.numbers, second.numbers}, 0)),
                   "input");
    EXPECT_EQ(weights[0].grad().defined(), trains);
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
        recipe.recipe == WeightRecipe::kFp8Block || recipe.weight_gradient == ProductForm::kPlain;
    EXPECT_EQ(!watched.expired(), is_needed) << to_text(recipe);
    output.sum().backward();
    EXPECT_TRUE(weight.grad().isfinite().all().item<bool>()) << to_text(recipe);
  }
}

// Quantised once, and with a scale per token.
TEST(QuantizedLinear, KeepsAByteOfEveryNumberForAllWeightsOfAnInput) {
  const at::Tensor input = waves({64, 128}, 0.1).to(at::kBFloat16);
  const Tensors weights = {tagged(waves({32, 128}, 0.2), {}, at::kBFloat16),
                           tagged(waves({48, 128}, 0.3), {}, at::kBFloat16),
                           tagged(waves({16, 128}, 0.4), {}, at::kBFloat16)};
  const fsdp::testing::TensorAllocations allocations;
  const Tensors outputs = linear(input, weights, Tensors(3));
  int64_t output_bytes = 0;
  for (const at::Tensor& output : outputs) output_bytes += static_cast<int64_t>(output.nbytes());
  EXPECT_EQ(allocations.now_bytes() - output_bytes, 64 * 128 + 64 * 4);
}

TEST(QuantizedLinear, IsOfAModuleThatSaysSo) {
  EXPECT_TRUE(Linear(16, 32)->is_quantizable("weight"));
  EXPECT_FALSE(Linear(16, 32)->is_quantizable("bias"));
  EXPECT_FALSE(Linear(16, 24)->is_quantizable("weight")) << "GPUs multiply multiples of 16";
  EXPECT_TRUE(Projection(ProjectionOptions{16, 32})->is_quantizable("weight"));
  Linear layer(48, 32);
  const Recipe recipe;
  layer->weight = tagged(waves({32, 48}, 0.2), recipe, at::kFloat);
  EXPECT_TRUE(layer(waves({16, 48}, 0.1)).isfinite().all().item<bool>());
}

// --- slabs ---------------------------------------------------------------------------------------

struct TwiceImpl : torch::nn::Module {
  TwiceImpl() : linear(register_module("linear", Linear(32, 32))) {}
  at::Tensor forward(const at::Tensor& x) { return linear(at::tanh(linear(x))); }
  Linear linear;
};

struct NetImpl : torch::nn::Module {
  NetImpl() : twice(register_module("twice", Unit<TwiceImpl>())) {}
  at::Tensor forward(const at::Tensor& x) { return twice(x); }
  Unit<TwiceImpl> twice;
};

// Written to the slab by the first product, and added by the second.
TEST(QuantizedLinear, WritesItsWeightGradientToTheSlab) {
  for (const Recipe& recipe : code_recipes()) {
    const at::Tensor numbers = waves({32, 32}, 0.2);
    const at::Tensor weight = tagged(numbers, recipe, at::kFloat);
    const at::Tensor bias = waves({32}, 0.3).set_requires_grad(true);
    const at::Tensor input = waves({16, 32}, 0.1);
    linear(at::tanh(linear(input, weight, bias)), weight, bias).square().sum().backward();
    run_ranks(1, [&](World& world) {
      const Mesh mesh = world.mesh();
      const auto model = std::make_shared<NetImpl>();
      {
        const at::NoGradGuard no_grad;
        model->twice->linear->bias.copy_(bias);
      }
      const Sharded sharded = fully_shard(model, mesh);
      tag(model->twice->linear->weight, numbers, recipe);
      model->forward(input).square().sum().backward();
      const ShardedParameter sharded_weight = sharded.parameters().front();
      ASSERT_EQ(sharded_weight.name, "twice.linear.weight");
      EXPECT_TRUE(at::equal(sharded_weight.gradient.view({32, 32}), weight.grad()))
          << to_text(recipe);
    });
  }
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
  const at::Tensor ends = at::tensor({7, 7, 20}, at::kInt);
  for (const Recipe& recipe : code_recipes())
    expect_numbers_used(recipe, {20, 48, 3 * 32}, [&](const at::Tensor& rows, const auto& weight) {
      return grouped_linear(rows, weight, row_groups(rows, ends, {48, 32}));
    });
}

}  // namespace
}  // namespace fsdp::nn::quantized_linear_test
