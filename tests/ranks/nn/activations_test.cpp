// Layers keep for their backward what plans say, where the host keeps the same as a device.
#include "fsdp/plan/activations.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <vector>

#include "fsdp/nn/layers/experts.h"
#include "fsdp/nn/layers/gated_delta_net.h"
#include "fsdp/nn/layers/mamba2.h"
#include "support/allocation_log.h"

namespace fsdp::nn::activations_test {
namespace {

using fsdp::testing::AllocationLog;

constexpr int64_t kTokens = 512;

struct Measured {
  double kept = 0;  // bytes that a forward leaves beside its output
  double peak = 0;  // the most of its backward, beside output and input gradients
};

Measured measured(const std::vector<at::Tensor>& inputs,
                  const std::function<at::Tensor()>& forward) {
  const AllocationLog log(AllocationLog::Of::kHost);
  const at::Tensor output = forward();
  Measured result;
  const auto output_bytes = static_cast<double>(output.nbytes());
  result.kept = static_cast<double>(log.bytes()) - output_bytes;
  const at::Tensor gradient = at::ones_like(output);
  double gradients = 2 * output_bytes;
  for (const at::Tensor& input : inputs) gradients += static_cast<double>(input.nbytes());
  output.backward(gradient);
  result.peak = static_cast<double>(log.peak_bytes()) - gradients;
  return result;
}

double planned(const std::vector<KeptTensor>& kept) {
  double bytes = 0;
  for (const KeptTensor& tensor : kept)
    bytes += static_cast<double>(kTokens * tensor.elements_per_token * tensor.element_bytes);
  return bytes;
}

at::Tensor input_of(at::IntArrayRef shape, at::ScalarType type = at::kFloat) {
  return at::rand(shape, type).set_requires_grad(true);
}

TEST(Activations, OfExpertsAreThosePlanned) {
  for (const MlpKind kind : {MlpKind::kGatedSilu, MlpKind::kSquaredRelu}) {
    const bool is_gated = kind == MlpKind::kGatedSilu;
    Experts experts(ExpertsOptions{.router = {.hidden_size = 64, .num_experts = 8, .num_chosen = 2},
                                   .intermediate_size = 96,
                                   .kind = kind,
                                   .shared_size = 80,
                                   .is_shared_gated = is_gated});
    experts->to(at::kBFloat16);
    const at::Tensor x = input_of({1, kTokens, 64}, at::kBFloat16);
    const double kept = planned(experts_activations({.hidden = 64,
                                                     .tokens = 64,
                                                     .intermediate = 96,
                                                     .experts = 8,
                                                     .chosen = 2,
                                                     .shared = 80,
                                                     .is_gated = is_gated,
                                                     .is_shared_gated = is_gated},
                                                    {})
                                    .kept);
    const Measured actual = measured({x}, [&] { return experts(x).output; });
    // Routers' figures of all experts, and rows' ends, are a few bytes more.
    EXPECT_NEAR(actual.kept, kept, 0.02 * kept) << (is_gated ? "gated" : "squared");
  }
}

TEST(Activations, OfTheSelectiveScanAreThosePlanned) {
  const NemotronHConfig config{.hybrid_override_pattern = "M",
                               .mamba_num_heads = 8,
                               .mamba_head_dim = 16,
                               .n_groups = 2,
                               .ssm_state_size = 32,
                               .chunk_size = 64};
  const std::vector<at::Tensor> inputs = {
      input_of({1, kTokens, 8, 16}), input_of({1, kTokens, 8}),     input_of({8}),
      input_of({1, kTokens, 2, 32}), input_of({1, kTokens, 2, 32}), input_of({8})};
  const Measured actual = measured(inputs, [&] {
    return selective_scan({.x = inputs[0],
                           .step = inputs[1],
                           .a = -inputs[2],
                           .b = inputs[3],
                           .c = inputs[4],
                           .d = inputs[5]},
                          config.chunk_size);
  });
  const BlockActivations plan = scan_activations(config, {});
  EXPECT_NEAR(actual.kept, planned(plan.kept), 0.05 * planned(plan.kept));
  const double peak = planned(plan.kept) + static_cast<double>(plan.working_bytes(kTokens));
  EXPECT_NEAR(actual.peak, peak, 0.15 * peak);
}

TEST(Activations, OfTheDeltaRuleAreThosePlanned) {
  const Qwen3NextConfig config{.decoder = {},
                               .linear_num_key_heads = 2,
                               .linear_num_value_heads = 4,
                               .linear_key_head_dim = 32,
                               .linear_value_head_dim = 32};
  const std::vector<at::Tensor> inputs = {
      input_of({1, kTokens, 2, 32}), input_of({1, kTokens, 2, 32}), input_of({1, kTokens, 4, 32}),
      input_of({1, kTokens, 4}), input_of({1, kTokens, 4})};
  double given = 0;  // the table has the rule's inputs, too
  for (const at::Tensor& input : inputs) given += static_cast<double>(input.nbytes());
  const at::Tensor key = (inputs[1] / 32).detach().set_requires_grad(true);
  const at::Tensor decay = (-inputs[3]).detach().set_requires_grad(true);
  const Measured actual = measured(inputs, [&] {
    return gated_delta_rule(
        {.query = inputs[0], .key = key, .value = inputs[2], .log_decay = decay, .beta = inputs[4]},
        64);
  });
  const BlockActivations plan = delta_rule_activations(config, {});
  const double kept = planned(plan.kept) - given;
  const double states =
      2.0 * 4 * 32 * 32 * 4;  // the first and the last one, beside those of chunks
  EXPECT_NEAR(actual.kept, kept + states, 0.05 * planned(plan.kept));
  const double peak = kept + static_cast<double>(plan.working_bytes(kTokens));
  EXPECT_NEAR(actual.peak, peak, 0.15 * peak);
}

}  // namespace
}  // namespace fsdp::nn::activations_test
