// The Gated DeltaNet mixer and its delta rule, against one position after the other.
#include "fsdp/nn/layers/gated_delta_net.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "fsdp/base/text.h"
#include "support/layer_gradients.h"

namespace fsdp::nn::gated_delta_net_test {
namespace {

using fsdp::testing::expect_near;
using fsdp::testing::output_and_gradients;
using fsdp::testing::waves;

// Both sides compute in fp64: some hundred roundings of 1e-16.
constexpr double kExact = 1e-12;
// fp32 rounds at 6e-8; sums over positions and keys, and several of them in a row.
constexpr double kRounded = 5e-6;

at::Tensor unit_rows(const at::Tensor& x) { return x / (x.square().sum(-1, true) + 1e-6).sqrt(); }

// --- the rule ------------------------------------------------------------------------------------

struct Heads {
  int64_t keys, values;
};

// From any numbers, so that gradients are those of numbers without bounds.
DeltaRuleInput rule_input(const std::vector<at::Tensor>& in) {
  return {.query = in[0],
          .key = unit_rows(in[1]),
          .value = in[2],
          .log_decay = -at::softplus(in[3]),
          .beta = in[4].sigmoid()};
}

// Decays from log(1 + e^-6) to log(1 + e^6), corrections from hardly any to nearly all.
std::vector<at::Tensor> rule_values(int64_t sequence, Heads heads) {
  return {waves({2, sequence, heads.keys, 5}, 0.1), waves({2, sequence, heads.keys, 5}, 0.2),
          waves({2, sequence, heads.values, 4}, 0.3), waves({2, sequence, heads.values}, 0.4, 6.0),
          waves({2, sequence, heads.values}, 0.5, 4.0)};
}

// The formula in the header, from `state` on, which becomes the last state.
at::Tensor one_by_one(const DeltaRuleInput& in, at::Tensor& state) {
  const int64_t shared = in.value.size(2) / in.key.size(2);
  const at::Tensor query = in.query.repeat_interleave(shared, 2);
  const at::Tensor key = in.key.repeat_interleave(shared, 2);
  std::vector<at::Tensor> outputs;
  for (int64_t t = 0; t < key.size(1); ++t) {
    const at::Tensor k = key.select(1, t).unsqueeze(-1);
    state = state * in.log_decay.select(1, t).exp().unsqueeze(-1).unsqueeze(-1);
    const at::Tensor error = in.value.select(1, t) - (state * k).sum(-2);
    const at::Tensor delta = error * in.beta.select(1, t).unsqueeze(-1);
    state = state + k * delta.unsqueeze(-2);
    outputs.push_back((state * query.select(1, t).unsqueeze(-1)).sum(-2));
  }
  return at::stack(outputs, 1);
}

at::Tensor zero_state(const DeltaRuleInput& in) {
  return at::zeros({in.key.size(0), in.value.size(2), in.key.size(3), in.value.size(3)},
                   in.value.options());
}

at::Tensor recurrence(const std::vector<at::Tensor>& in) {
  const DeltaRuleInput input = rule_input(in);
  at::Tensor state = zero_state(input);
  return one_by_one(input, state);
}

void expect_the_recurrence(const std::vector<at::Tensor>& values, int64_t chunk,
                           const std::string& what) {
  const auto chunked = [&](const std::vector<at::Tensor>& in) {
    return gated_delta_rule(rule_input(in), chunk);
  };
  const auto expected = output_and_gradients(recurrence, values, at::kDouble);
  expect_near(output_and_gradients(chunked, values, at::kDouble), expected, kExact,
              what + " in fp64");
  expect_near(output_and_gradients(chunked, values, at::kFloat), expected, kRounded,
              what + " in fp32");
}

TEST(DeltaRule, EqualsTheRecurrenceForEveryChunkSizeAndLength) {
  for (const Heads heads : {Heads{1, 1}, Heads{2, 6}})
    for (const int64_t sequence : {1, 7, 33})
      for (const int64_t chunk : {1, 5, 16, 64})
        expect_the_recurrence(rule_values(sequence, heads), chunk,
                              concat(heads.values, " heads of ", heads.keys, ", sequence ",
                                     sequence, ", chunk ", chunk));
}

// Behind them the sums of logarithms are large, and their differences small.
TEST(DeltaRule, KeepsItsDigitsBehindStrongDecays) {
  std::vector<at::Tensor> values = rule_values(96, {1, 2});
  values[3].fill_(-2.0);
  values[3].narrow(1, 0, 40).fill_(300.0);
  expect_the_recurrence(values, 64, "strong decays");
}

// The hardest triangular system: every position corrects what all others before it wrote.
TEST(DeltaRule, IsStableWhereAllKeysAreAlikeAndNothingIsForgotten) {
  std::vector<at::Tensor> values = rule_values(200, {1, 1});
  values[1] = values[1] * 0.01 + 1.0;
  values[3].fill_(-20.0);
  values[4].fill_(20.0);
  for (const int64_t chunk : {64, 200}) expect_the_recurrence(values, chunk, "like keys");
}

// Two parts in a row, with gradients of the last state and through the one between them.
TEST(DeltaRule, GoesOnFromAState) {
  const auto with_last_state = [](const at::Tensor& y, const at::Tensor& state) {
    return at::cat({y.flatten(), state.flatten()});
  };
  const auto whole = [&](const std::vector<at::Tensor>& in) {
    const DeltaRuleInput input = rule_input(in);
    at::Tensor state = in[5];
    const at::Tensor y = one_by_one(input, state);
    return with_last_state(y, state);
  };
  std::vector<at::Tensor> values = rule_values(23, {2, 4});
  values[3] = values[3] * 0.2 - 2.0;  // states live long
  values.push_back(waves({2, 4, 5, 4}, 0.6));
  const auto expected = output_and_gradients(whole, values, at::kDouble);
  for (const int64_t first : {1, 8, 22}) {  // the last one leaves a single position
    const auto in_parts = [&](const std::vector<at::Tensor>& in) {
      at::Tensor state = in[5];
      std::vector<at::Tensor> parts;
      for (const auto& [begin, size] : {std::pair{int64_t{0}, first}, {first, 23 - first}}) {
        std::vector<at::Tensor> part;
        for (size_t i = 0; i < 5; ++i) part.push_back(in[i].narrow(1, begin, size));
        parts.push_back(gated_delta_rule(rule_input(part), 8, &state));
      }
      return with_last_state(at::cat(parts, 1), state);
    };
    expect_near(output_and_gradients(in_parts, values, at::kDouble), expected, kExact,
                concat("first part ", first));
  }
}

// --- the mixer -----------------------------------------------------------------------------------

GatedDeltaNetOptions small_options(Heads heads, int64_t chunk_size) {
  return {.hidden_size = 12,
          .num_key_heads = heads.keys,
          .num_value_heads = heads.values,
          .key_head_dim = 5,
          .value_head_dim = 4,
          .chunk_size = chunk_size};
}

// With values of the size that training leaves; all of them differ.
GatedDeltaNet small_layer(const GatedDeltaNetOptions& options, at::ScalarType dtype = at::kFloat) {
  GatedDeltaNet layer(options);
  const at::NoGradGuard no_grad;
  double phase = 0.0;
  for (at::Tensor& parameter : layer->parameters())
    parameter.copy_(waves(parameter.sizes(), phase += 1.3, 0.7));
  layer->to(dtype);
  return layer;
}

// The layer's output, and the gradients of its input and its parameters.
std::vector<at::Tensor> layer_results(GatedDeltaNet& layer, const at::Tensor& x) {
  const at::Tensor input = x.detach().clone().set_requires_grad(true);
  std::vector<at::Tensor> results = {layer(input)};
  (results[0] * waves(results[0].sizes(), 0.3).to(x.scalar_type())).sum().backward();
  results.push_back(input.grad());
  for (const at::Tensor& parameter : layer->parameters()) results.push_back(parameter.grad());
  return results;
}

// Only what goes in and out of matrices and the convolution is bf16, with 8 digits: a handful of
// roundings of 0.4 % in a row, in sums of which most cancel.
TEST(GatedDeltaNet, OfBf16IsThatOfFp32Rounded) {
  GatedDeltaNet narrow = small_layer(small_options({2, 4}, 16), at::kBFloat16);
  GatedDeltaNet wide = small_layer(small_options({2, 4}, 16), at::kBFloat16);
  wide->to(at::kFloat);
  const at::Tensor x = waves({2, 40, 12}, 0.5).to(at::kBFloat16);
  const auto actual = layer_results(narrow, x);
  for (const at::Tensor& each : actual) EXPECT_EQ(each.scalar_type(), at::kBFloat16);
  std::vector<at::Tensor> expected;
  for (const at::Tensor& each : layer_results(wide, x.to(at::kFloat)))
    expected.push_back(each.to(at::kDouble));
  expect_near(actual, expected, 0.03, "bf16");
}

// Seeds and names are those of all layers (language_model_test).
TEST(GatedDeltaNet, BeginsWithThePublishedRates) {
  torch::nn::Module model;
  const auto layer = model.register_module("mixer", GatedDeltaNet(small_options({4, 16}, 64)));
  initialize_by_name(model, 3);
  const auto values = layer->named_parameters();
  const at::Tensor rate = values["A_log"].detach().exp();
  EXPECT_GE(rate.min().item<double>(), 0.01 - 1e-6);
  EXPECT_LE(rate.max().item<double>(), 16.0 + 1e-5);
  EXPECT_GT(rate.std().item<double>(), 2.0);
  EXPECT_TRUE(at::equal(values["dt_bias"], at::ones({16})));
}

}  // namespace
}  // namespace fsdp::nn::gated_delta_net_test
