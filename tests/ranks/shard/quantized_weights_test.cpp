// Weights that are gathered as codes and scales: sharded quantisation is that of the whole matrix,
// bit for bit, whoever has which part of it.
#include <gmock/gmock.h>

#include <map>
#include <mutex>

#include "fsdp/base/error.h"
#include "fsdp/comm/communicator.h"
#include "fsdp/optim/adamw.h"
#include "fsdp/shard/fully_shard.h"
#include "fsdp/shard/layer_weights.h"
#include "fsdp/shard/unit.h"
#include "support/error_of.h"
#include "support/one_in.h"
#include "support/optimizer_training.h"
#include "support/reference_quantizer.h"

namespace fsdp::testing::quantized_weights_test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

// Rows and columns that are no multiples of blocks or ranks; 160 is one of 32.
constexpr int64_t kIn = 160;
constexpr int64_t kOut = 131;

at::Tensor numbers_of(const QuantizedWeight& weight) {
  const WeightRecipeRow& row = row_of(weight.recipe);
  const at::Tensor codes = weight.codes.to(at::kFloat);
  at::Tensor scales = weight.scales;
  if (weight.recipe == WeightRecipe::kMxFp8) scales = at::exp2(scales.to(at::kDouble) - 127.0);
  const int64_t block_rows = row.scale_rows == 0 ? codes.size(0) : row.scale_rows;
  const int64_t block_columns = row.scale_columns == 0 ? codes.size(1) : row.scale_columns;
  return codes * scales.to(at::kFloat)
                     .repeat_interleave(block_rows, 0)
                     .narrow(0, 0, codes.size(0))
                     .repeat_interleave(block_columns, 1)
                     .narrow(1, 0, codes.size(1));
}

// The weights that layers saw in their forward, by the parameter's name.
using Seen = std::map<std::string, QuantizedWeight>;

// x * weight^T, by the numbers of the codes; its gradient is that of a plain layer.
struct QuantizedLayer : torch::nn::Module, QuantizableModule {
  QuantizedLayer(int64_t out, int64_t in, std::string its_name, Seen* into)
      : weight(register_parameter("weight", at::rand({out, in}) - 0.5)),
        bias(register_parameter("bias", at::rand({out}))),
        name(std::move(its_name)),
        seen(into) {}
  bool is_quantizable(const std::string& parameter) const override { return parameter == "weight"; }
  at::Tensor forward(const at::Tensor& x) {
    const auto quantized = quantized_weight(weight);
    if (!quantized) return at::linear(x, weight, bias);
    QuantizedWeight kept = *quantized;
    for (at::Tensor* tensor : {&kept.codes, &kept.scales}) *tensor = tensor->clone();
    if (seen != nullptr) (*seen)[name] = kept;
    return Product::apply(x, weight, numbers_of(*quantized)) + bias;
  }
  struct Product : torch::autograd::Function<Product> {
    static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& x,
                              const at::Tensor& weight, const at::Tensor& numbers) {
      context->save_for_backward({x, weight, numbers});
      return at::linear(x, numbers);
    }
    static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                   torch::autograd::variable_list gradients) {
      const auto saved = context->get_saved_variables();
      EXPECT_TRUE(quantized_weight(saved[1]).has_value());  // found in the backward, too
      return {gradients[0].matmul(saved[2]), gradients[0].t().mm(saved[0]), at::Tensor()};
    }
  };
  at::Tensor weight, bias;
  std::string name;
  Seen* seen;
};

struct BlockImpl : torch::nn::Module {
  BlockImpl(const std::string& name, Seen* seen)
      : up(register_module("up",
                           std::make_shared<QuantizedLayer>(kOut, kIn, name + ".up.weight", seen))),
        down(register_module(
            "down", std::make_shared<QuantizedLayer>(kIn, 2 * kIn, name + ".down.weight", seen))),
        plain(register_parameter("plain", at::rand({2 * kIn, kOut}) - 0.5)) {}
  at::Tensor forward(const at::Tensor& x) {
    return x + down->forward(at::linear(at::tanh(up->forward(x)), plain)) * 0.05;
  }
  std::shared_ptr<QuantizedLayer> up, down;
  at::Tensor plain;
};
TORCH_MODULE(Block);

struct NetImpl : torch::nn::Module {
  explicit NetImpl(Seen* seen)
      : first(register_module("first", Unit<Block>("first", seen))),
        second(register_module("second", Unit<Block>("second", seen))) {}
  at::Tensor forward(const at::Tensor& x) { return second(first(x)); }
  Unit<Block> first{nullptr}, second{nullptr};
};
TORCH_MODULE(Net);

Net make_net(Seen* seen) {
  Net net = build([&] { return Net(seen); });
  const at::NoGradGuard no_grad;
  net->first->up->weight[5].zero_();       // a block of zeros
  net->first->up->weight[6].mul_(1e-30);   // one of small numbers
  net->second->down->weight[0][3] = 40.0;  // a large one
  return net;
}

at::Tensor input_of(int rank, int step) {
  return (at::arange(4 * kIn).view({4, kIn}) * 0.37 + rank + 10 * step).sin();
}

struct Case {
  WeightRecipe recipe = WeightRecipe::kFp8Row;
  int ranks = 1;
  int outer = 1;
  std::string strategy = "optim_grads_params";
  double offload = 0.0;
  Granularity granularity = Granularity::element();
};

std::string text_of(const Case& each) {
  return std::string(row_of(each.recipe).name) + " ranks " + std::to_string(each.ranks) +
         " outer " + std::to_string(each.outer) + " " + each.strategy + " offload " +
         std::to_string(each.offload) + " " + to_text(each.granularity);
}

ShardOptions options_of(const Case& each) {
  return {.strategy = parse_strategy(each.strategy),
          .quantization = {.recipe = each.recipe},
          .offload = {.fraction = each.offload},
          .granularity = each.granularity};
}

void expect_codes(const QuantizedWeight& actual, const ReferenceCodes& expected,
                  const std::string& what) {
  EXPECT_TRUE(at::equal(actual.codes.view(at::kByte), expected.codes)) << what;
  EXPECT_TRUE(at::equal(actual.scales, expected.scales)) << what;
}

// After some steps, codes and scales of the whole matrices and the numbers they were made of.
struct Trained {
  Seen seen;
  std::map<std::string, at::Tensor> main_weights;
  std::vector<double> losses;
};

enum class Inputs { kOfEachRank, kTheSame };

Trained train_net(const Case& each, int steps = 3, Inputs inputs = Inputs::kOfEachRank) {
  Trained result;
  MainWeightCollector collector;
  std::mutex mutex;
  run_ranks(each.ranks, [&](World& world) {
    const Mesh mesh = world.mesh({.outer = each.outer});
    Seen seen;
    Net net = make_net(&seen);
    const Sharded sharded = fully_shard(net.ptr(), mesh, options_of(each));
    AdamW optimizer(sharded, {.lr = 0.01});
    std::vector<double> losses;
    for (int step = 0; step < steps; ++step) {
      at::Tensor loss =
          net(input_of(inputs == Inputs::kTheSame ? 0 : world.rank(), step)).square().mean();
      losses.push_back(loss.item<double>());
      loss.backward();
      optimizer.step();
      optimizer.zero_grad();
    }
    {
      const at::NoGradGuard no_grad;
      net(input_of(0, 0));  // sees the last weights
    }
    collector.add(sharded);
    const std::lock_guard lock(mutex);
    for (const auto& [name, weight] : seen) {
      const QuantizedWeight& first = result.seen.try_emplace(name, weight).first->second;
      EXPECT_TRUE(at::equal(first.codes.view(at::kByte), weight.codes.view(at::kByte)));
    }
    if (world.rank() == 0) result.losses = losses;
  });
  result.main_weights = collector.take();
  return result;
}

std::vector<WeightRecipe> quantizing_recipes() {
  std::vector<WeightRecipe> recipes;
  for (const WeightRecipeRow& row : all_weight_recipes())
    if (row.recipe != WeightRecipe::kPlain) recipes.push_back(row.recipe);
  return recipes;
}

void expect_whole_quantization(const Case& each) {
  const Trained trained = train_net(each);
  ASSERT_EQ(trained.seen.size(), 4);
  for (const auto& [name, weight] : trained.seen) {
    const at::Tensor matrix = trained.main_weights.at(name).view({weight.codes.size(0), -1});
    expect_codes(weight, quantized_by_loop(matrix, each.recipe), text_of(each) + " " + name);
  }
}

// --- claims --------------------------------------------------------------------------------------

TEST(QuantizedWeights, AreThoseOfTheWholeMatrixHoweverItIsCut) {
  OneIn few(3);
  for (const WeightRecipe recipe : quantizing_recipes()) {
    std::vector<Case> cases = {{.ranks = 1}, {.ranks = 3}, {.ranks = 5}, {.ranks = 8}};
    for (const std::string& strategy : kStrategies) {
      cases.push_back({.ranks = 4, .outer = 2, .strategy = strategy});
      if (strategy.find("hfsdp") == std::string::npos)
        cases.push_back({.ranks = 2, .strategy = strategy});
    }
    for (const Granularity granularity :
         {Granularity::row(), Granularity::block(48), Granularity::tensor()})
      cases.push_back({.ranks = 3,
                       .offload = row_of(recipe).scale_bytes == 4 ? 0.4 : 0.0,
                       .granularity = granularity});
    for (Case& each : cases) {
      each.recipe = recipe;
      if (!few.skips()) expect_whole_quantization(each);
    }
  }
}

TEST(QuantizedWeights, LearnTheSameOnAnyNumberOfRanks) {
  // Every rank has the same input, so that all numbers of ranks have the same gradients.
  for (const WeightRecipe recipe : quantizing_recipes()) {
    const Trained one = train_net({.recipe = recipe}, 3, Inputs::kTheSame);
    const Trained several = train_net({.recipe = recipe, .ranks = 4}, 3, Inputs::kTheSame);
    EXPECT_EQ(several.losses, one.losses) << row_of(recipe).name;
  }
}

// --- what is lost --------------------------------------------------------------------------------

TEST(QuantizedWeights, CountNumbersThatTheyLose) {
  run_ranks(2, [](World& world) {
    const Mesh mesh = world.mesh();
    Net net = make_net(nullptr);
    const Sharded sharded =
        fully_shard(net.ptr(), mesh, options_of({.recipe = WeightRecipe::kFp8Tensor}));
    // Beside 40, everything below 40 / 448 / 2^10 is lost.
    at::Tensor counts = sharded.take_cast_counts();
    mesh.inner().reduce().all_reduce(counts, {}, "counts").wait();
    EXPECT_EQ(counts[0].item<double>(), 0.0);
    EXPECT_GT(counts[1].item<double>(), kIn);  // a row of numbers of 1e-30, and more
    EXPECT_EQ(counts[2].item<double>(), 2 * (kOut * kIn + kIn * 2 * kIn));
    EXPECT_EQ(sharded.take_cast_counts().sum().item<double>(), 0.0) << "since the last time";
  });
}

// --- what stays plain, and mistakes --------------------------------------------------------------

TEST(QuantizedWeights, LeaveExceptionsAndFrozenWeightsPlain) {
  run_ranks(2, [](World& world) {
    const Mesh mesh = world.mesh();
    Seen seen;
    Net net = make_net(&seen);
    net->second->down->weight.set_requires_grad(false);
    ShardOptions options = options_of({});
    options.quantization.except = {"first.up.*"};
    const Sharded sharded = fully_shard(net.ptr(), mesh, options);
    net(input_of(0, 0)).sum().backward();
    EXPECT_THAT(seen, ::testing::UnorderedElementsAre(::testing::Key("first.down.weight"),
                                                      ::testing::Key("second.up.weight")));
  });
}

TEST(QuantizedWeights, HaveNoNumbersToTouch) {
  run_ranks(1, [](World& world) {
    const Mesh mesh = world.mesh();
    Net net = make_net(nullptr);
    const Sharded sharded = fully_shard(net.ptr(), mesh, options_of({}));
    EXPECT_THAT(error_of([&] { net->first->up->weight.sum(); }),
                AllOf(HasSubstr("parameter 'first.up.weight' is quantised (fp8-row)"),
                      HasSubstr("fsdp::quantized_weight")));
  });
}

std::string refusal(const ShardOptions& options, bool has_layers = true) {
  std::string error;
  run_ranks(1, [&](World& world) {
    const Mesh mesh = world.mesh();
    if (has_layers) {
      Net net = make_net(nullptr);
      error = error_of([&] { fully_shard(net.ptr(), mesh, options); });
    } else {
      Chain chain = make_chain();
      error = error_of([&] { fully_shard(chain, mesh, options); });
    }
  });
  return error;
}

TEST(QuantizedWeights, RefuseWhatCannotBe) {
  ShardOptions options = options_of({});
  options.quantization.except = {"*.upp.*"};
  EXPECT_THAT(refusal(options), HasSubstr("quantization.except has '*.upp.*', but no parameter"));
  EXPECT_THAT(refusal(options_of({}), false), HasSubstr("no trained matrix that can be quantised"));
  options = options_of({});
  options.precision.main_params = std::nullopt;
  EXPECT_THAT(refusal(options), HasSubstr("for which main weights are fp32"));
  options = options_of({.recipe = WeightRecipe::kMxFp8, .offload = 0.5});
  EXPECT_THAT(refusal(options), HasSubstr("mxfp8, whose blocks must not be cut"));
}

}  // namespace
}  // namespace fsdp::testing::quantized_weights_test
