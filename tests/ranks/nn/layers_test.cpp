// Layers of language models against slow and obvious versions of the same computation.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <map>
#include <thread>

#include "fsdp/base/text.h"
#include "fsdp/nn/decoder.h"
#include "fsdp/nn/layers/causal_conv.h"
#include "fsdp/nn/layers/feed_forward.h"
#include "fsdp/nn/layers/mamba2.h"
#include "fsdp/nn/layers/rms_norm.h"
#include "fsdp/nn/layers/rotary.h"
#include "support/layer_gradients.h"
#include "support/small_models.h"

namespace fsdp::nn::layers_test {
namespace {

using fsdp::testing::expect_near;
using fsdp::testing::output_and_gradients;
using fsdp::testing::waves;

TEST(RmsNorm, EqualsItsFormulaInDoublePrecision) {
  for (const int64_t groups : {1, 3}) {
    for (const int64_t width : {3, 36, 192}) {
      const auto ours = [&](const std::vector<at::Tensor>& in) {
        return rms_norm(in[0], in[1], 1e-5, groups);
      };
      const auto formula = [&](const std::vector<at::Tensor>& in) {
        const at::Tensor x = in[0].unflatten(-1, {groups, width / groups});
        return (x * (x.square().mean(-1, true) + 1e-5).rsqrt()).flatten(-2) * in[1];
      };
      // 300 rows: several tasks' sums of the weight's gradient.
      const std::vector<at::Tensor> values = {waves({2, 150, width}, 0.0, 3.0),
                                              waves({width}, 1.0)};
      expect_near(output_and_gradients(ours, values, at::kFloat),
                  output_and_gradients(formula, values, at::kDouble), 3e-6, "rms_norm");
    }
  }
}

TEST(RmsNorm, OfOtherTypesIsThatOfFp32Rounded) {
  const at::Tensor x = waves({4, 30}, 0.0, 3.0).to(at::kBFloat16);
  const at::Tensor w = waves({30}, 1.0).to(at::kBFloat16);
  for (const int64_t groups : {1, 2}) {
    const at::Tensor exact = rms_norm(x.to(at::kFloat), w.to(at::kFloat), 1e-5, groups);
    const at::Tensor narrow = rms_norm(x, w, 1e-5, groups);
    EXPECT_EQ(narrow.scalar_type(), at::kBFloat16);
    // Half a unit of bf16's last place, or one where it is rounded twice.
    EXPECT_TRUE(at::allclose(narrow.to(at::kFloat), exact, groups == 1 ? 0.004 : 0.008, 1e-6));
  }
}

// Rounded once, to half a unit of bf16, though bf16 has no factor for such a weight.
TEST(RmsNorm, NormsByWeightsThatAreNotRoundedToFactors) {
  RmsNorm norm(64, 1e-6, NormWeight::kZeroCentred);
  {
    const at::NoGradGuard no_grad;
    norm->weight.fill_(0.003);
  }
  norm->to(at::kBFloat16);
  const at::Tensor x = waves({5, 64}, 0.5).to(at::kBFloat16);
  const at::Tensor exact = at::rms_norm(x.to(at::kDouble), {64}, {}, 1e-6) *
                           (1.0 + norm->weight.detach().to(at::kDouble));
  const at::Tensor y = norm(x).detach().to(at::kDouble);
  EXPECT_LE(((y - exact) / exact).abs().max().item<double>(), 0x1.01p-8);
}

TEST(Rotary, RotatesPairsByTheirAngles) {
  LlamaConfig config{.hidden_size = 24, .num_attention_heads = 4, .head_dim = 6};
  Rotary rotary(config);
  // Twice as many heads of queries as of keys; all in one tensor, to be compared at once.
  const auto ours = [&](const std::vector<at::Tensor>& in) {
    const QueryAndKey rotated =
        rotate({in[0], in[1]}, rotary.tables(0, in[0].size(1), in[0].device()));
    return at::cat({rotated.query, rotated.key}, 2);
  };
  const auto by_complex_numbers = [&](const std::vector<at::Tensor>& in) {
    const auto half = at::cat({in[0], in[1]}, 2).chunk(2, -1);
    const at::Tensor angle = at::outer(at::arange(in[0].size(1), at::kDouble),
                                       at::tensor(rotary_frequencies(config), at::kDouble));
    const at::Tensor turned =
        at::complex(half[0], half[1]) * at::polar(at::ones_like(angle), angle).unsqueeze(1);
    return at::cat({at::real(turned), at::imag(turned)}, -1);
  };
  const std::vector<at::Tensor> values = {waves({2, 50, 4, 6}, 0.0), waves({2, 50, 2, 6}, 1.0)};
  // Angles up to 49 in fp32: 49 * 6e-8.
  expect_near(output_and_gradients(ours, values, at::kFloat),
              output_and_gradients(by_complex_numbers, values, at::kDouble), 6e-6, "rotary");
  const std::vector<at::Tensor> narrow = {values[0].to(at::kBFloat16), values[1].to(at::kBFloat16)};
  const std::vector<at::Tensor> wide = {narrow[0].to(at::kFloat), narrow[1].to(at::kFloat)};
  EXPECT_TRUE(at::equal(ours(narrow), ours(wide).to(at::kBFloat16)));
}

TEST(GatedSilu, EqualsItsFormulaInDoublePrecision) {
  const std::vector<at::Tensor> values = {waves({5, 40}, 0.0, 4.0), waves({5, 40}, 1.0)};
  expect_near(output_and_gradients([](const auto& in) { return gated_silu(in[0], in[1]); }, values,
                                   at::kFloat),
              output_and_gradients([](const auto& in) { return in[0] * in[0].sigmoid() * in[1]; },
                                   values, at::kDouble),
              1e-6, "gated_silu");
}

// One layer of 3 sections with the given weight and bias.
at::Tensor causal_conv(const std::vector<at::Tensor>& in) {
  const int64_t third = in[1].size(0) / 3;
  CausalConv layer(std::vector<int64_t>{third, third, third}, in[1].size(2), /*with_bias=*/true);
  layer->weight = in[1];
  layer->bias = in[2];
  return layer(in[0], nullptr);
}

at::Tensor libtorchs_conv(const std::vector<at::Tensor>& in) {
  const int64_t before = in[1].size(2) - 1;
  return at::conv1d(in[0].transpose(1, 2), in[1], in[2], 1, before, 1, in[1].size(0))
      .narrow(2, 0, in[0].size(1))
      .transpose(1, 2);
}

TEST(CausalConv, EqualsLibtorchsInDoublePrecision) {
  for (const int64_t sequence : {1, 2, 9}) {
    const std::vector<at::Tensor> values = {waves({2, sequence, 12}, 0.0), waves({12, 1, 4}, 1.0),
                                            waves({12}, 2.0)};
    expect_near(output_and_gradients(causal_conv, values, at::kFloat),
                output_and_gradients(libtorchs_conv, values, at::kDouble), 3e-6, "causal_conv");
  }
}

// oneDNN's depthwise convolution, on processors where it is Arm's, mixes up the weights of threads.
TEST(CausalConv, OfRanksThatAreThreadsUsesEachOnesWeights) {
  std::array<double, 2> worst{};
  const auto run = [&](int rank) {
    const std::vector<at::Tensor> values = {waves({8, 16, 192}, rank), waves({192, 1, 4}, rank + 3),
                                            waves({192}, rank + 5)};
    std::vector<at::Tensor> wide;
    for (const at::Tensor& value : values) wide.push_back(value.to(at::kDouble));
    const at::Tensor expected = libtorchs_conv(wide);
    for (int i = 0; i < 100; ++i)
      worst[rank] =
          std::max(worst[rank], (causal_conv(values) - expected).abs().max().item<double>());
  };
  std::thread other(run, 1);
  run(0);
  other.join();
  EXPECT_LT(worst[0], 1e-5);
  EXPECT_LT(worst[1], 1e-5);
}

// --- selective scan ------------------------------------------------------------------------------

ScanInput scan_input(const std::vector<at::Tensor>& in) {
  return {.x = in[0],
          .step = at::softplus(in[1]),
          .a = -in[2].exp(),
          .b = in[3],
          .c = in[4],
          .d = in[5]};
}

// One position after the other, by the formula in the header.
at::Tensor step_by_step(const ScanInput& in) {
  const int64_t heads = in.x.size(2);
  const int64_t repeats = heads / in.b.size(2);
  const at::Tensor b = in.b.repeat_interleave(repeats, 2);
  const at::Tensor c = in.c.repeat_interleave(repeats, 2);
  at::Tensor state = at::zeros({in.x.size(0), heads, in.x.size(3), in.b.size(3)}, in.x.options());
  std::vector<at::Tensor> outputs;
  for (int64_t t = 0; t < in.x.size(1); ++t) {
    const at::Tensor x = in.x.select(1, t);
    const at::Tensor step = in.step.select(1, t).unsqueeze(-1);
    state = (step * in.a.unsqueeze(-1)).exp().unsqueeze(-1) * state +
            (step * x).unsqueeze(-1) * b.select(1, t).unsqueeze(-2);
    outputs.push_back((state * c.select(1, t).unsqueeze(-2)).sum(-1) + in.d.unsqueeze(-1) * x);
  }
  return at::stack(outputs, 1);
}

TEST(SelectiveScan, EqualsTheRecurrenceForEveryChunkSizeAndLength) {
  const auto exact = [](const std::vector<at::Tensor>& in) { return step_by_step(scan_input(in)); };
  for (const int64_t sequence : {1, 7, 33}) {
    // Steps from short to long: log(1 + e^-6) to log(1 + e^6).
    const std::vector<at::Tensor> values = {
        waves({2, sequence, 6, 4}, 0.1), waves({2, sequence, 6}, 0.2, 6.0), waves({6}, 0.3, 1.5),
        waves({2, sequence, 3, 5}, 0.4), waves({2, sequence, 3, 5}, 0.5),   waves({6}, 0.6)};
    const auto expected = output_and_gradients(exact, values, at::kDouble);
    for (const int64_t chunk : {1, 5, 16, 64}) {
      const auto chunked = [&](const std::vector<at::Tensor>& in) {
        return selective_scan(scan_input(in), chunk);
      };
      expect_near(output_and_gradients(chunked, values, at::kFloat), expected, 5e-6,
                  concat("sequence ", sequence, ", chunk ", chunk));
    }
  }
}

// Long steps first: the remaining state is far below the precision of fp32 sums of exponents.
TEST(SelectiveScan, KeepsItsDigitsBehindLongSteps) {
  const int64_t sequence = 64;
  std::vector<at::Tensor> values = {
      waves({1, sequence, 1, 2}, 0.1), at::full({1, sequence, 1}, -2.0), at::full({1}, 3.0),
      waves({1, sequence, 1, 3}, 0.4), waves({1, sequence, 1, 3}, 0.5),  waves({1}, 0.6)};
  values[1].narrow(1, 0, 32).fill_(20.0);
  const auto expected = output_and_gradients(
      [](const auto& in) { return step_by_step(scan_input(in)); }, values, at::kDouble);
  const auto actual = output_and_gradients(
      [](const auto& in) { return selective_scan(scan_input(in), 64); }, values, at::kFloat);
  expect_near(actual, expected, 5e-6, "long steps");
}

// --- multi-token prediction ----------------------------------------------------------------------

// The blocks are those of a model with as many main ones and the same weights.
TEST(MultiTokenPrediction, EqualsAPlainRecomputation) {
  LlamaConfig config = fsdp::testing::small_llama();
  config.num_nextn_predict_layers = 2;
  config.mtp_loss_weight = 0.4;
  const auto model = build_language_model(config, {.seed = 4});
  fsdp::testing::disturb(*model);
  LlamaConfig deeper = config;
  deeper.num_nextn_predict_layers = 0;
  deeper.num_hidden_layers = 4;
  const auto plain = build_language_model(deeper, {.seed = 4});
  const auto weights = model->named_parameters();
  for (auto& item : plain->named_parameters()) item.value().set_data(weights[item.key()].data());
  const at::Tensor batch = fsdp::testing::small_tokens(0, 0, 2, 9);
  const at::Tensor tokens = batch.narrow(1, 0, 9);
  const at::Tensor targets = batch.narrow(1, 1, 9);

  const auto plain_weights = plain->named_parameters();
  const auto modules = plain->named_modules();
  const auto block = [&](int64_t index, const at::Tensor& x) {
    return modules[concat("model.layers.", index)]->as<BlockImpl>()->forward(x, {})[0];
  };
  const auto norm = [&](const at::Tensor& weight, const at::Tensor& x) {
    return x * (x.square().mean(-1, true) + config.rms_norm_eps).rsqrt() * weight;
  };
  const at::Tensor& embedding = plain_weights["model.embed_tokens.weight"];
  const auto loss_of = [&](const at::Tensor& normed, const at::Tensor& next) {
    return at::cross_entropy_loss(at::linear(normed, plain_weights["lm_head.weight"]).flatten(0, 1),
                                  next.flatten());
  };
  at::Tensor hidden = block(1, block(0, embedding.index({tokens})));
  const at::Tensor first = loss_of(norm(plain_weights["lm_head.norm.weight"], hidden), targets);
  at::Tensor further = at::zeros({});
  for (int64_t k = 1; k <= 2; ++k) {
    const std::string name = concat("model.layers.", 1 + k, ".");
    // Position i knows its state and token i + k, and predicts token i + k + 1.
    const at::Tensor joined =
        at::cat({norm(weights[name + "enorm.weight"], embedding.index({tokens.slice(1, k)})),
                 norm(weights[name + "hnorm.weight"], hidden.slice(1, 0, -1))},
                -1);
    hidden = block(1 + k, at::linear(joined, weights[name + "eh_proj.weight"]));
    further =
        further +
        loss_of(norm(weights[name + "shared_head.norm.weight"], hidden), targets.slice(1, k)) / 2;
  }
  (first + further * 0.4).backward();
  std::map<std::string, at::Tensor> expected;  // of whichever has it
  for (const auto& each : {weights, plain_weights})
    for (const auto& item : each)
      if (item.value().grad().defined()) expected[item.key()] = item.value().grad().clone();
  model->zero_grad();
  const ModelLoss loss = model->loss(tokens, targets);
  ASSERT_EQ(loss.terms.size(), 2u);
  EXPECT_NEAR(loss.terms[0].value.item<double>(), first.item<double>(), 1e-5);
  EXPECT_EQ(loss.terms[1].name, "mtp");
  EXPECT_NEAR(loss.terms[1].value.item<double>(), further.item<double>(), 1e-5);
  loss.total.backward();
  ASSERT_EQ(expected.size(), weights.size());
  for (const auto& item : weights)
    EXPECT_TRUE(at::allclose(item.value().grad(), expected.at(item.key()), 1e-4, 1e-5))
        << item.key();
}

}  // namespace
}  // namespace fsdp::nn::layers_test
