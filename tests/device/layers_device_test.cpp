// The kernels of the layers against plain formulas in fp64 of the same inputs: nothing but the
// rounding of the result, and what fp32 arithmetic needs.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <exception>
#include <functional>
#include <string>
#include <vector>

#include "fsdp/base/text.h"
#include "fsdp/nn/kernels/layer_kernels.h"
#include "fsdp/nn/layers/expert_route.h"
#include "fsdp/nn/layers/feed_forward.h"
#include "fsdp/nn/layers/linear.h"
#include "fsdp/nn/layers/rms_norm.h"
#include "fsdp/nn/layers/rotary.h"
#include "support/device_layers.h"

namespace fsdp::nn::layers_device_test {
namespace {

using namespace device_layers;

// --- rotary positions ----------------------------------------------------------------------------

struct Heads {
  int64_t batch, sequence, queries, keys, dim;
};

void check_rotation(const Heads& n, at::ScalarType type, int64_t first_position) {
  Rotary rotary(
      {.hidden_size = n.queries * n.dim, .num_attention_heads = n.queries, .head_dim = n.dim});
  const RotaryTables tables =
      rotary.tables(first_position, first_position + n.sequence, at::Device(at::kCUDA, 0));
  const Function ours = [&](const Tensors& in) {
    const QueryAndKey rotated = rotate({in[0], in[1]}, tables);
    // Attention wants heads before positions: gradients come back strided.
    return Tensors{rotated.query.transpose(1, 2), rotated.key.transpose(1, 2)};
  };
  const Function formula = [&](const Tensors& in) {
    Tensors results;
    for (const at::Tensor& x : in) {
      const auto half = x.chunk(2, -1);
      const at::Tensor c = tables.cosine.to(at::kDouble).unsqueeze(1);
      const at::Tensor s = tables.sine.to(at::kDouble).unsqueeze(1);
      results.push_back(
          at::cat({half[0] * c - half[1] * s, half[1] * c + half[0] * s}, -1).transpose(1, 2));
    }
    return results;
  };
  // Queries and keys from one matrix product: strided.
  const at::Tensor both = numbers({n.batch, n.sequence, n.queries + n.keys, n.dim}, type);
  const Tensors values = {both.narrow(2, 0, n.queries), both.narrow(2, n.queries, n.keys)};
  const Tensors gradients = in_double({numbers({n.batch, n.queries, n.sequence, n.dim}, type),
                                       numbers({n.batch, n.keys, n.sequence, n.dim}, type)});
  const Tensors actual = outputs_and_gradients(ours, values, gradients);
  const Tensors expected = outputs_and_gradients(formula, in_double(values), gradients);
  // Two products and their sum, of numbers up to 6.
  const at::Tensor slack = at::full({}, 6 * 3 * 0x1p-24, at::device(at::kCUDA).dtype(at::kDouble));
  for (size_t i = 0; i < actual.size(); ++i)
    expect_rounded(actual[i], expected[i], slack, "rotary " + std::to_string(i));
}

TEST(RotaryOnDevice, EqualsItsFormulaRoundedOnce) {
  FSDP_REQUIRE_DEVICE_LAYERS();
  at::manual_seed(1);
  for (const at::ScalarType type : kTypes) {
    check_rotation({2, 33, 4, 2, 64}, type, 0);
    check_rotation({1, 40, 32, 4, 128}, type, 7);
    check_rotation({3, 5, 2, 1, 6}, type, 1);     // no packs
    check_rotation({1, 1, 1, 1, 2}, type, 1000);  // one token, one pair
    check_rotation({0, 5, 2, 2, 16}, type, 0);
  }
}

TEST(RotaryOnDevice, ComputesTheHostsBits) {
  FSDP_REQUIRE_DEVICE_LAYERS();
  at::manual_seed(2);
  Rotary rotary({.hidden_size = 64, .num_attention_heads = 2, .head_dim = 32});
  const at::Tensor query = numbers({2, 50, 2, 32}, at::kFloat);
  const at::Tensor key = numbers({2, 50, 1, 32}, at::kFloat);
  const QueryAndKey device = rotate({query, key}, rotary.tables(0, 50, query.device()));
  const QueryAndKey host = rotate({query.cpu(), key.cpu()}, rotary.tables(0, 50, at::kCPU));
  EXPECT_TRUE(at::equal(device.query.cpu(), host.query));
  EXPECT_TRUE(at::equal(device.key.cpu(), host.key));
}

// Each sequence of the batch has its own table, as where several documents share a sequence.
TEST(RotaryOnDevice, TakesATableForEachSequence) {
  FSDP_REQUIRE_DEVICE_LAYERS();
  at::manual_seed(4);
  const at::Tensor query = numbers({3, 50, 4, 32}, at::kFloat);
  const at::Tensor key = numbers({3, 50, 2, 32}, at::kFloat);
  const at::Tensor angle = numbers({3, 50, 16}, at::kFloat);
  const RotaryTables tables{angle.cos(), angle.sin()};
  for (const auto direction : {RotationDirection::kForward, RotationDirection::kBack}) {
    const QueryAndKey device = rotated({query, key}, tables, direction);
    for (int64_t i = 0; i < 3; ++i) {
      const QueryAndKey alone = rotated({query.narrow(0, i, 1), key.narrow(0, i, 1)},
                                        {tables.cosine[i], tables.sine[i]}, direction);
      EXPECT_TRUE(at::equal(device.query[i], alone.query[0]));
      EXPECT_TRUE(at::equal(device.key[i], alone.key[0]));
    }
  }
}

// --- gated MLP -----------------------------------------------------------------------------------

const Function kGatedSilu = [](const Tensors& in) { return Tensors{gated_silu(in[0], in[1])}; };

void check_gated_silu(const Tensors& values, const at::Tensor& gradient) {
  const Function formula = [](const Tensors& in) {
    return Tensors{in[0] * in[0].sigmoid() * in[1]};
  };
  const Tensors actual = outputs_and_gradients(kGatedSilu, values, {gradient});
  const Tensors expected = outputs_and_gradients(formula, in_double(values), {gradient});
  const at::Tensor g = values[0].to(at::kDouble).abs();
  const at::Tensor u = values[1].to(at::kDouble).abs();
  // The sigmoid to four units of fp32, three products; its derivative has a zero.
  constexpr double kUnits = 8 * 0x1p-24;
  expect_rounded(actual[0], expected[0], expected[0].abs() * kUnits, "silu(gate) * up");
  expect_rounded(actual[1], expected[1], gradient.abs() * u * (1.0 + g) * kUnits, "of gate");
  expect_rounded(actual[2], expected[2], expected[2].abs() * kUnits, "of up");
}

TEST(GatedSiluOnDevice, EqualsItsFormulaRoundedOnce) {
  FSDP_REQUIRE_DEVICE_LAYERS();
  at::manual_seed(3);
  for (const at::ScalarType type : kTypes) {
    for (const int64_t numel : {0, 1, 7, 8, 4099, 3 * 2048}) {
      const at::Tensor gradient = numbers({numel}, type).to(at::kDouble);
      check_gated_silu({numbers({numel}, type, 3.0), numbers({numel}, type)}, gradient);
      // Not at a multiple of 16 bytes.
      check_gated_silu({numbers({numel + 1}, type).narrow(0, 1, numel), numbers({numel}, type)},
                       gradient);
    }
    // Columns of one matrix.
    const at::Tensor both = numbers({33, 2 * 40}, type);
    check_gated_silu({both.narrow(1, 0, 40), both.narrow(1, 40, 40)},
                     numbers({33, 40}, type).to(at::kDouble));
  }
}

TEST(GatedOnDevice, ComputesGelus) {
  FSDP_REQUIRE_DEVICE_LAYERS();
  at::manual_seed(3);
  constexpr double kUnits = 16 * 0x1p-24;  // of what is multiplied: 1 + erf(x) cancels where x < 0
  for (const at::ScalarType type : kTypes)
    for (const auto& [activation, kind] : {std::pair(GatedActivation::kGelu, "none"),
                                           std::pair(GatedActivation::kGeluTanh, "tanh")}) {
      const at::Tensor gate = numbers({33, 40}, type, 3.0);
      const at::Tensor up = numbers({33, 40}, type);
      const at::Tensor gradient = numbers({33, 40}, type);
      const Tensors wide = in_double({gate, up, gradient});
      const GatedInput input(activation, gate, up);
      const at::Tensor size = wide[0].abs() + 1.0;
      expect_rounded(gated(input), at::gelu(wide[0], kind) * wide[1], size * wide[1].abs() * kUnits,
                     "gelu(gate) * up");
      const auto [of_gate, of_up] = gated_backward(input, gradient);
      expect_rounded(of_gate, at::gelu_backward(wide[2] * wide[1], wide[0], kind),
                     size * size * (wide[1] * wide[2]).abs() * kUnits, "of gate");
      expect_rounded(of_up, at::gelu(wide[0], kind) * wide[2], size * wide[2].abs() * kUnits,
                     "of up");
      // Both in one matrix.
      const GatedInput halves(activation, at::cat({gate, up}, 1), {});
      EXPECT_TRUE(at::equal(gated(halves), gated(input)));
      EXPECT_TRUE(at::equal(gated_backward(halves, gradient).first, at::cat({of_gate, of_up}, 1)));
    }
}

TEST(GatedSiluOnDevice, StaysFiniteFarFromZero) {
  FSDP_REQUIRE_DEVICE_LAYERS();
  for (const at::ScalarType type : kTypes) {
    const at::Tensor gate = at::tensor({-6e4f, -200.0f, -90.0f, 0.0f, 90.0f, 200.0f, 6e4f},
                                       at::device(at::kCUDA).dtype(at::kFloat))
                                .to(type);
    const Tensors results =
        outputs_and_gradients(kGatedSilu, {gate, at::ones_like(gate)},
                              {at::ones_like(gate, gate.options().dtype(at::kDouble))});
    EXPECT_TRUE(at::allclose(results[0].to(at::kFloat), gate.to(at::kFloat).clamp_min(0)));
    EXPECT_TRUE(results[1].isfinite().all().item<bool>());
    EXPECT_TRUE(at::equal(results[0], results[2]));
  }
}

// --- experts -------------------------------------------------------------------------------------

at::Tensor random_choices(int64_t tokens, int64_t num_chosen, int64_t num_experts) {
  return std::get<1>(at::rand({tokens, num_experts}, at::device(at::kCUDA)).topk(num_chosen, 1));
}

TEST(ChoicesOnDevice, AreSortedAsOnTheHost) {
  FSDP_REQUIRE_DEVICE_LAYERS();
  for (const int64_t num_experts : {1, 16, 513, 1024, 1025})
    for (const int64_t num_choices : {0, 1, 255, 256, 257, 20000})
      for (const bool skewed : {false, true}) {
        const at::Tensor chosen = skewed ? at::full({num_choices, 1}, num_experts - 1,
                                                    at::device(at::kCUDA).dtype(at::kLong))
                                         : at::randint(num_experts, {num_choices, 1},
                                                       at::device(at::kCUDA).dtype(at::kLong));
        const SortedChoices actual = sort_choices(chosen, num_experts);
        const SortedChoices expected = sort_choices(chosen.cpu(), num_experts);
        const std::string what = concat(num_choices, " choices of ", num_experts, " experts");
        EXPECT_TRUE(at::equal(actual.order.cpu(), expected.order)) << what;
        EXPECT_TRUE(at::equal(actual.inverse.cpu(), expected.inverse)) << what;
        EXPECT_TRUE(at::equal(actual.ends.cpu(), expected.ends)) << what;
      }
}

struct Rows {
  int64_t tokens, num_chosen, size;
};

// The rows that tokens get back of the experts that do nothing, in rows of any size.
void check_expert_rows(const Rows& n, at::ScalarType type) {
  constexpr int64_t kExperts = 8;
  const auto route = c10::make_intrusive<ExpertRoute>(
      sort_choices(random_choices(n.tokens, n.num_chosen, kExperts), kExperts), at::Tensor(),
      ExpertRanks{});
  const Function ours = [&](const Tensors& in) {
    return Tensors{combine(dispatch(in[0], route) * in[2], in[1], route)};
  };
  const Tensors values = {numbers({n.tokens, n.size}, type),
                          numbers({n.tokens, n.num_chosen}, type),
                          at::ones({}, at::device(at::kCUDA).dtype(type))};
  const Tensors gradients = {numbers({n.tokens, n.size}, type).to(at::kDouble)};
  const Tensors actual = outputs_and_gradients(ours, values, gradients);
  const Tensors wide = in_double(values);
  const double ulp = 0x1p-23;
  const at::Tensor weight = wide[1].sum(1, true);
  const at::Tensor sizes = wide[1].abs().sum(1, true);
  const std::string what = concat("rows of ", n.tokens, " tokens, ", n.num_chosen, " each");
  expect_rounded(actual[0], wide[0] * weight, (wide[0] * sizes).abs() * (ulp * 8), what);
  // Between the two functions the gradients of rows are of the numbers' type, too.
  const double tiniest = type == at::kHalf ? 0x1p-25 * static_cast<double>(n.num_chosen) : 0.0;
  expect_rounded(actual[1], gradients[0] * weight,
                 (gradients[0] * sizes).abs() * (half_unit(type) + ulp * 8) + tiniest,
                 what + ", gradient");
  const at::Tensor product = (wide[0] * gradients[0]).sum(1, true).expand_as(wide[1]);
  const at::Tensor slack = (wide[0] * gradients[0]).abs().sum(1, true) * (ulp * 64);
  expect_rounded(actual[2], product, slack.expand_as(product), what + ", gradient of weights");
  expect_same_again(ours, values, gradients, what);
}

TEST(ExpertRowsOnDevice, EqualTheirFormulaRoundedOnce) {
  FSDP_REQUIRE_DEVICE_LAYERS();
  for (const at::ScalarType type : kTypes)
    for (const Rows& rows :
         {Rows{1, 1, 1}, Rows{5, 3, 7}, Rows{33, 2, 64}, Rows{9, 8, 264}, Rows{100, 6, 2048}})
      check_expert_rows(rows, type);
}

// --- norms ---------------------------------------------------------------------------------------

RmsNorm norm_with(const at::Tensor& weight, NormWeight form) {
  RmsNorm norm(weight.size(0), 1e-5, form);
  norm->weight = weight;
  return norm;
}

void check_norm(int64_t rows, int64_t size, at::ScalarType type, NormWeight form) {
  const double offset = form == NormWeight::kZeroCentred ? 1.0 : 0.0;
  const Function ours = [&](const Tensors& in) {
    const NormedBranch branch = norm_with(in[2], form)->branch(in[0], in[1]);
    return Tensors{branch.around, branch.normed};
  };
  const Tensors values = {numbers({rows, size}, type, 2.0), numbers({rows, size}, type),
                          numbers({size}, type)};
  // The sum is rounded before it is normed.
  const at::Tensor sum = (values[0] + values[1]).to(at::kDouble);
  const Function formula = [&](const Tensors& in) {
    return Tensors{in[0],
                   in[0] * (in[0].square().mean(-1, true) + 1e-5).rsqrt() * (offset + in[1])};
  };
  const Tensors gradients = in_double({numbers({rows, size}, type), numbers({rows, size}, type)});
  const Tensors actual = outputs_and_gradients(ours, values, gradients);
  const Tensors expected =
      outputs_and_gradients(formula, {sum, values[2].to(at::kDouble)}, gradients);
  const at::Tensor scale = (sum.square().mean(-1, true) + 1e-5).rsqrt();
  constexpr double kUnits = 16 * 0x1p-24;
  const std::string what = " of " + std::to_string(rows) + " rows";
  EXPECT_TRUE(at::equal(actual[0].to(at::kDouble), sum));
  expect_rounded(actual[1], expected[1], expected[1].abs() * kUnits, "normed" + what);
  const at::Tensor terms = (gradients[1] * (offset + values[2].to(at::kDouble))).abs() * scale;
  const at::Tensor slack =
      (gradients[0].abs() + terms + (sum.abs() * scale) * terms.mean(-1, true)) * kUnits;
  expect_rounded(actual[2], expected[2], slack, "of x" + what);
  EXPECT_TRUE(at::equal(actual[2], actual[3]));
  const at::Tensor weight_terms = (gradients[1] * sum).abs() * scale;
  expect_rounded(actual[4], expected[3], weight_terms.sum(0) * kUnits * 4, "of weight" + what);
}

TEST(RmsNormOnDevice, EqualsItsFormulaRoundedOnce) {
  FSDP_REQUIRE_DEVICE_LAYERS();
  at::manual_seed(5);
  for (const at::ScalarType type : kTypes)
    for (const int64_t size : {8, 64, 128, 200, 264, 1000, 1024, 2048, 4096, 8192})
      for (const int64_t rows : {1, 37, 1100})
        for (const NormWeight form : {NormWeight::kFactor, NormWeight::kZeroCentred})
          check_norm(rows, size, type, form);
}

// Sizes that no kernel is made for, parts of larger tensors, other types of weight: libtorch's.
TEST(RmsNormOnDevice, TakesWhateverComes) {
  FSDP_REQUIRE_DEVICE_LAYERS();
  for (const int64_t size : {7, 30, 2048, 40000}) {
    const at::Tensor x = numbers({3, 5, size + 1}, at::kBFloat16).narrow(2, 1, size);
    const at::Tensor w = numbers({size}, at::kBFloat16);
    const at::Tensor expected = rms_norm(x.to(at::kFloat).cpu(), w.to(at::kFloat).cpu(), 1e-5);
    for (const at::ScalarType type : {at::kBFloat16, at::kFloat})
      EXPECT_TRUE(
          at::allclose(rms_norm(x, w.to(type), 1e-5).to(at::kFloat).cpu(), expected, 0.008, 1e-6))
          << size;
  }
  const at::Tensor none = numbers({0, 64}, at::kBFloat16).set_requires_grad(true);
  const at::Tensor weight = numbers({64}, at::kBFloat16).set_requires_grad(true);
  rms_norm(none, weight, 1e-5).sum().backward();
  EXPECT_EQ(weight.grad().abs().sum().item<double>(), 0.0);
}

// --- projections ---------------------------------------------------------------------------------

TEST(LinearOnDevice, SumsGradientsOfOneInput) {
  FSDP_REQUIRE_DEVICE_LAYERS();
  at::manual_seed(7);
  const std::vector<at::Tensor> biases(3);
  for (const at::ScalarType type : kTypes) {
    const Function ours = [&](const Tensors& in) {
      return linear(in[0], {in[1], in[2], in[3]}, biases);
    };
    const Function formula = [](const Tensors& in) {
      return Tensors{at::linear(in[0], in[1]), at::linear(in[0], in[2]), at::linear(in[0], in[3])};
    };
    const Tensors values = {numbers({2, 5, 24}, type), numbers({16, 24}, type),
                            numbers({8, 24}, type), numbers({40, 24}, type)};
    const Tensors gradients =
        in_double({numbers({2, 5, 16}, type), numbers({2, 5, 8}, type), numbers({2, 5, 40}, type)});
    const Tensors actual = outputs_and_gradients(ours, values, gradients);
    const Tensors expected = outputs_and_gradients(formula, in_double(values), gradients);
    // The input's gradient is rounded by each product.
    for (size_t i = 0; i < actual.size(); ++i)
      expect_rounded(actual[i], expected[i], expected[i].abs().max() * 3 * half_unit(type),
                     "linear " + std::to_string(i));
  }
}

// --- all -----------------------------------------------------------------------------------------

TEST(LayersOnDevice, ComputeTheSameBitsInEveryRun) {
  FSDP_REQUIRE_DEVICE_LAYERS();
  at::manual_seed(6);
  const auto random = [](at::IntArrayRef shape) { return numbers(shape, at::kBFloat16); };
  const auto gradient = [&](at::IntArrayRef shape) { return random(shape).to(at::kDouble); };
  expect_same_again(kGatedSilu, {random({300, 5632}), random({300, 5632})}, {gradient({300, 5632})},
                    "gated_silu");
  expect_same_again(
      [&](const Tensors& in) {
        const NormedBranch branch = norm_with(in[1], NormWeight::kFactor)->branch(in[0]);
        return Tensors{branch.around, branch.normed};
      },
      {random({4000, 2048}), random({2048})}, {gradient({4000, 2048}), gradient({4000, 2048})},
      "rms_norm");
}

}  // namespace
}  // namespace fsdp::nn::layers_device_test
