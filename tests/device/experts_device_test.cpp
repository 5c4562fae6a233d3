// Experts on a CUDA device: what the host computes, shared out among ranks or not, without a wait,
// and whole steps as graphs.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "fsdp/base/text.h"
#include "fsdp/graph/graph.h"
#include "fsdp/nn/layers/experts.h"
#include "fsdp/optim/adamw.h"
#include "fsdp/shard/fully_shard.h"
#include "fsdp/shard/unit.h"
#include "support/device_trace.h"
#include "support/layer_gradients.h"
#include "support/require.h"
#include "support/run_ranks.h"
#include "support/small_models.h"

namespace fsdp::nn::experts_device_test {
namespace {

using testing::run_ranks;
using testing::waves;

constexpr int64_t kHidden = 64;

struct LayerImpl : torch::nn::Module {
  explicit LayerImpl(const ExpertsOptions& options)
      : experts(register_module("experts", Experts(options))) {}
  std::vector<at::Tensor> forward(const at::Tensor& x) {
    RoutedTokens routed = experts(x);
    std::vector<at::Tensor> results = {routed.output};
    if (routed.load.dropped.defined()) results.push_back(routed.load.dropped);
    return results;
  }
  Experts experts;
};

struct NetImpl : torch::nn::Module {
  explicit NetImpl(const ExpertsOptions& options)
      : layer(register_module("layer", Unit<LayerImpl>(options))) {
    const at::NoGradGuard no_grad;
    double phase = 0.0;
    for (at::Tensor& parameter : parameters())
      parameter.copy_(waves(parameter.sizes(), phase += 1.3, 0.2));
  }
  Unit<LayerImpl> layer;
};

ExpertsOptions small_options(int64_t num_chosen) {
  return {.router = {.hidden_size = kHidden, .num_experts = 8, .num_chosen = num_chosen},
          .intermediate_size = 96};
}

// The output, and the gradients of x and of all parameters, on the host in fp32.
std::vector<at::Tensor> results_of(NetImpl& net, const at::Tensor& values) {
  const at::Tensor x = values.detach().clone().set_requires_grad(true);
  const at::Tensor y = net.layer(x)[0];
  (y * waves(y.sizes(), 0.9).to(y.options())).sum().backward();
  std::vector<at::Tensor> results = {y.detach(), x.grad()};
  for (const at::Tensor& parameter : net.parameters()) results.push_back(parameter.grad());
  for (at::Tensor& result : results) result = result.cpu().to(at::kFloat);
  return results;
}

// The gradient of a router that gives one choice all the weight is 0 but for rounding.
void expect_close(const at::Tensor& actual, const at::Tensor& expected, double tolerance,
                  const std::string& what) {
  EXPECT_LT((actual - expected).abs().max().item<double>(),
            tolerance * expected.abs().max().item<double>() + 5e-6)
      << what;
}

// bf16: weights and tokens are rounded to 8 bits and so are the results of each of three products.
double tolerance_of(at::ScalarType dtype) { return dtype == at::kFloat ? 1e-5 : 3e-2; }

TEST(ExpertsOnDevice, ComputeWhatTheHostDoes) {
  FSDP_REQUIRE_GPU();
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16})
    for (const int64_t num_chosen : {1, 2, 8}) {
      // Both sides have equal rounded numbers, or tokens would choose other experts.
      NetImpl host(small_options(num_chosen));
      NetImpl device(small_options(num_chosen));
      host.to(dtype);
      host.to(at::kFloat);
      device.to(dtype);
      device.to(at::kCUDA);
      const at::Tensor x = waves({3, 50, kHidden}, 0.5).to(dtype);
      const auto expected = results_of(host, x.to(at::kFloat));
      const auto actual = results_of(device, x.cuda());
      for (size_t i = 0; i < expected.size(); ++i)
        expect_close(actual[i], expected[i], tolerance_of(dtype),
                     concat(c10::toString(dtype), ", ", num_chosen, " of 8, tensor ", i));
    }
}

TEST(ExpertsOnDevice, WithoutTokensGetGradientsOfZero) {
  FSDP_REQUIRE_GPU();
  NetImpl net(small_options(1));
  {
    const at::NoGradGuard no_grad;
    at::Tensor gate = net.named_parameters()["layer.experts.gate.weight"];
    gate.zero_();
    gate[2].fill_(1.0);  // for tokens with positive sums
  }
  net.to(at::kBFloat16);
  net.to(at::kCUDA);
  results_of(net, waves({1, 40, kHidden}, 0.5).abs().to(at::kBFloat16).cuda());
  for (const auto& item : net.named_parameters()) {
    if (item.key().find(".experts.experts.") == std::string::npos) continue;
    const std::vector<at::Tensor> parts = item.value().grad().chunk(8);
    for (size_t i = 0; i < 8; ++i)
      EXPECT_EQ(parts[i].abs().sum().item<double>() > 0, i == 2) << item.key() << " of " << i;
  }
}

// Every rank of an ep group has room for all tokens.
TEST(ExpertsOnDevice, ComputeTheSameSharedOut) {
  FSDP_REQUIRE_GPU();
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16})
    for (const int ep : {2, 4})
      for (const int64_t num_chosen : {1, 3})
        for (const bool skewed : {false, true})
          run_ranks(4, [&](World& world) {
            const auto whole = std::make_shared<NetImpl>(small_options(num_chosen));
            const auto shared_out = std::make_shared<NetImpl>(small_options(num_chosen));
            at::Tensor x = waves({2, 30, kHidden}, 0.5 + world.rank()).to(dtype);
            for (const auto& net : {whole, shared_out}) {
              const at::NoGradGuard no_grad;
              if (skewed)
                net->named_parameters()["layer.experts.gate.weight"].narrow(0, 0, 3).fill_(1.0);
              net->to(dtype);
              net->to(at::kCUDA);
            }
            x = (skewed ? x.abs() : x).cuda();
            const Mesh mesh = world.mesh({.ep = ep});
            const Sharded sharded =
                fully_shard(shared_out, mesh, {.device = at::Device(at::kCUDA, 0)});
            const auto run = [&](NetImpl& net) {
              const at::Tensor input = x.detach().clone().set_requires_grad(true);
              const at::Tensor y = net.layer(input)[0];
              y.square().sum().backward();
              return std::pair{y.detach().cpu().to(at::kFloat), input.grad().cpu().to(at::kFloat)};
            };
            const auto [expected, expected_gradient] = run(*whole);
            const auto [actual, gradient] = run(*shared_out);
            const std::string which = concat(c10::toString(dtype), ", ep ", ep, ", ", num_chosen,
                                             skewed ? " skewed" : "");
            expect_close(actual, expected, tolerance_of(dtype) / 3, which);
            expect_close(gradient, expected_gradient, tolerance_of(dtype) / 3, which);
          });
}

// All tokens choose one of eight experts, where an eighth of them finds room.
TEST(ExpertsOnDevice, DropAndCountWhatIsBeyondTheirCapacity) {
  FSDP_REQUIRE_GPU();
  run_ranks(2, [&](World& world) {
    ExpertsOptions options = small_options(1);
    options.capacity_factor = 1.0;
    const auto net = std::make_shared<NetImpl>(options);
    {
      const at::NoGradGuard no_grad;
      net->named_parameters()["layer.experts.gate.weight"].zero_()[1].fill_(1.0);
    }
    net->to(at::kBFloat16);
    net->to(at::kCUDA);
    NetImpl whole(small_options(1));
    {
      const at::NoGradGuard no_grad;
      whole.named_parameters()["layer.experts.gate.weight"].zero_()[1].fill_(1.0);
    }
    whole.to(at::kBFloat16);
    whole.to(at::kCUDA);
    const at::Tensor x = waves({1, 40, kHidden}, 0.5).abs().to(at::kBFloat16).cuda();
    const Mesh mesh = world.mesh({.ep = 2});
    const Sharded sharded = fully_shard(net, mesh, {.device = at::Device(at::kCUDA, 0)});
    const at::Tensor input = x.detach().clone().set_requires_grad(true);
    const std::vector<at::Tensor> results = net->layer(input);
    ASSERT_EQ(results.size(), 2u);
    EXPECT_EQ(results[1].item<float>(), 0.875f);
    const at::Tensor expected = whole.layer(x)[0];
    const at::Tensor is_kept = results[0].detach().abs().sum(2, true).gt(0);  // [1, tokens, 1]
    EXPECT_EQ(is_kept.sum().item<int64_t>(), 5);
    expect_close(results[0].detach().to(at::kFloat).cpu(),
                 expected.detach().mul(is_kept).to(at::kFloat).cpu(), 1e-2, "kept");
    results[0].square().sum().backward();
    EXPECT_EQ(input.grad().abs().sum(2, true).masked_fill(is_kept, 0).sum().item<float>(), 0.0f);
    EXPECT_TRUE(input.grad().isfinite().all().item<bool>());
  });
}

// --- whole models --------------------------------------------------------------------------------

struct Training {
  const Mesh& mesh;
  std::shared_ptr<LanguageModel> model;
  Sharded sharded;
  std::unique_ptr<AdamW> optimizer;
  at::Tensor tokens = testing::small_tokens(0, 0).cuda();
  at::Tensor loss;

  Training(const Mesh& on, const ShardOptions& options,
           const ModelConfig& config = testing::aligned_mixtral())
      : mesh(on),
        model(build_language_model(config, {.seed = 3, .dtype = at::kBFloat16})),
        sharded([&] {
          model->to(at::kCUDA);
          return fully_shard(model, on, options);
        }()),
        optimizer(std::make_unique<AdamW>(sharded,
                                          AdamWOptions{.lr = 1e-2, .step = {.max_norm = 0.5}})) {}

  void step() {
    const ModelLoss result = testing::small_loss(*model, tokens);
    result.total.backward();
    optimizer->step();
    optimizer->zero_grad();
    model->end_step(mesh);
    loss = result.total.detach();
  }
};

TEST(ExpertsOnDevice, AreReplayedBitwiseAsEagerSteps) {
  FSDP_REQUIRE_GPU();
  run_ranks(1, [](World& world) {
    const Mesh mesh = world.mesh();
    const ModelConfig configs[] = {testing::aligned_mixtral(), testing::aligned_mixtral(),
                                   testing::aligned_expert_hybrid(), testing::aligned_qwen3_next()};
    for (size_t i = 0; i < std::size(configs); ++i) {
      const ShardOptions options{
          .precision = {.main_grads = at::kFloat},
          .collectives = i == 0 ? Collectives::kBetweenRanks : Collectives::kAlways};
      Training eager(mesh, options, configs[i]);
      Training replayed(mesh, options, configs[i]);
      Graph graph(replayed.sharded, replayed.optimizer.get(), [&] { replayed.step(); });
      double first = 0.0;
      for (int number = 0; number < 30; ++number) {
        for (Training* each : {&eager, &replayed})
          each->tokens.copy_(testing::small_tokens(0, number % 5));
        eager.step();
        graph.run();
        ASSERT_EQ(replayed.loss.item<double>(), eager.loss.item<double>())
            << "model " << i << ", step " << number;
        if (number == 0) first = eager.loss.item<double>();
      }
      const std::vector<at::Tensor> biases = eager.model->buffers();
      for (size_t k = 0; k < biases.size(); ++k)
        EXPECT_TRUE(at::equal(replayed.model->buffers()[k], biases[k])) << "router " << k;
      EXPECT_TRUE(graph.is_recorded()) << "model " << i;
      EXPECT_LT(eager.loss.item<double>(), 0.9 * first);
    }
  });
}

TEST(ExpertsOnDevice, NeverLetTheHostWait) {
  FSDP_REQUIRE_GPU();
  run_ranks(1, [](World& world) {
    const Mesh mesh = world.mesh();
    Training training(mesh, {.collectives = Collectives::kAlways});
    for (int i = 0; i < 3; ++i) training.step();
    const testing::DeviceTrace trace = testing::trace_device(world, [&] {
      for (int i = 0; i < 3; ++i) training.step();
    });
    EXPECT_TRUE(trace.waits().empty()) << trace.text();
  });
}

}  // namespace
}  // namespace fsdp::nn::experts_device_test
