// fsdp::nn::Linear computes like at::linear, wherever its gradient is written.
#include "fsdp/nn/layers/linear.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/linear.h>

#include <map>
#include <string>
#include <tuple>
#include <vector>

#include "fsdp/base/text.h"
#include "fsdp/comm/world.h"
#include "fsdp/shard/fully_shard.h"
#include "fsdp/shard/unit.h"
#include "support/run_ranks.h"

namespace fsdp::linear_test {
namespace {

using testing::run_ranks;

constexpr int64_t kIn = 24;
constexpr int64_t kOut = 17;

at::Tensor pattern(std::vector<int64_t> shape, double phase, at::ScalarType dtype) {
  const int64_t numel = c10::multiply_integers(shape);
  return (at::arange(numel, at::kFloat) * 0.7 + phase).sin().view(shape).to(dtype);
}

template <typename Linear>
Linear make_linear(bool with_bias, at::ScalarType dtype) {
  Linear linear(torch::nn::LinearOptions(kIn, kOut).bias(with_bias));
  const at::NoGradGuard no_grad;
  linear->weight.copy_(pattern({kOut, kIn}, 0.1, at::kFloat));
  if (with_bias) linear->bias.copy_(pattern({kOut}, 0.2, at::kFloat));
  linear->to(dtype);
  return linear;
}

// The function that Python's layer calls. The C++ library's layer rounds a product before it adds
// the bias if the input does not have two dimensions, which bf16 shows.
struct ReferenceLinearImpl : torch::nn::LinearImpl {
  using torch::nn::LinearImpl::LinearImpl;
  at::Tensor forward(const at::Tensor& x) {
    return at::linear(x, weight, bias.defined() ? std::optional(bias) : std::nullopt);
  }
};
TORCH_MODULE(ReferenceLinear);

using PlainCase = std::tuple<at::ScalarType, bool, std::vector<int64_t>>;
class PlainLinear : public ::testing::TestWithParam<PlainCase> {};

TEST_P(PlainLinear, GivesTheBitsOfAtLinear) {
  const auto& [dtype, with_bias, rows] = GetParam();
  std::vector<int64_t> shape = rows;
  shape.push_back(kIn);
  const auto run = [&, dtype = dtype](auto linear) {
    const at::Tensor x = pattern(shape, 0.3, dtype).requires_grad_();
    const at::Tensor y = linear(x);
    for (int i = 0; i < 2; ++i) y.square().sum().backward({}, /*keep_graph=*/true);
    std::vector<at::Tensor> results{y.detach(), x.grad(), linear->weight.grad()};
    if (linear->bias.defined()) results.push_back(linear->bias.grad());
    return results;
  };
  const std::vector<at::Tensor> actual = run(make_linear<nn::Linear>(with_bias, dtype));
  const std::vector<at::Tensor> expected = run(make_linear<ReferenceLinear>(with_bias, dtype));
  ASSERT_EQ(actual.size(), expected.size());
  for (size_t i = 0; i < actual.size(); ++i) EXPECT_TRUE(at::equal(actual[i], expected[i])) << i;
}

INSTANTIATE_TEST_SUITE_P(Cases, PlainLinear,
                         ::testing::Combine(::testing::Values(at::kFloat, at::kBFloat16),
                                            ::testing::Bool(),
                                            ::testing::Values(std::vector<int64_t>{5},
                                                              std::vector<int64_t>{2, 3},
                                                              std::vector<int64_t>{})));

// --- sharded -------------------------------------------------------------------------------------

template <typename Linear>
struct TwoUsesImpl : torch::nn::Module {
  TwoUsesImpl()
      : first(register_module("first", make_linear<Linear>(true, at::kFloat))),
        second(register_module("second", make_linear<Linear>(false, at::kFloat))) {}
  at::Tensor forward(const at::Tensor& x) { return first(x) * second(x) + second(x * 0.5); }
  Linear first;
  Linear second;
};

// Gradients of this rank's shards, after this many microbatches.
template <typename Linear>
std::map<std::string, at::Tensor> sharded_gradients(World& world, const std::string& strategy,
                                                    int microbatches) {
  const Mesh mesh = world.mesh();
  Unit<TwoUsesImpl<Linear>> unit;
  const Sharded sharded = fully_shard(unit, mesh, {.strategy = parse_strategy(strategy)});
  for (int i = 0; i < microbatches; ++i) {
    sharded.microbatch({.last = i + 1 == microbatches});
    unit(pattern({6, kIn}, world.rank() + 10 * i, at::kFloat)).square().mean().backward();
  }
  std::map<std::string, at::Tensor> gradients;
  for (const ShardedParameter& parameter : sharded.parameters())
    gradients[parameter.name] = parameter.gradient.clone();
  return gradients;
}

TEST(ShardedLinear, GivesTheGradientsOfTorch) {
  for (const char* strategy : {"no_shard", "optim", "optim_grads", "optim_grads_params"})
    for (const int ranks : {1, 3})
      for (const int microbatches : {1, 3})
        run_ranks(ranks, [&](World& world) {
          SCOPED_TRACE(concat(strategy, " ", ranks, " ranks, ", microbatches, " microbatches"));
          const auto actual = sharded_gradients<nn::Linear>(world, strategy, microbatches);
          const auto expected = sharded_gradients<torch::nn::Linear>(world, strategy, microbatches);
          ASSERT_EQ(actual.size(), expected.size());
          for (const auto& [name, gradient] : actual) {
            // A weight that is used once in one backward is one product, wherever it is written.
            // Otherwise a product is added within its dot product, of 6 terms, and not afterwards:
            // some roundings of fp32 relative to gradients of about 1.
            const bool is_one_product = name.find("first") == 0 && microbatches == 1;
            const double tolerance = is_one_product ? 0.0 : 6 * 3 * 0x1p-24;
            EXPECT_TRUE(at::allclose(gradient, expected.at(name), tolerance, tolerance)) << name;
          }
        });
}

}  // namespace
}  // namespace fsdp::linear_test
