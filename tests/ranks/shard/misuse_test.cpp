// Code for plain models on a sharded one: it works, or fails at once and says what to do.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/nn/utils/clip_grad.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>

#include "fsdp/optim/adamw.h"
#include "fsdp/optim/sgd.h"
#include "support/run_ranks.h"
#include "support/sharded_training.h"

namespace fsdp::misuse_test {
namespace {

using ::testing::AllOf;
using testing::build;
using testing::Chain;
using testing::error_of;
using testing::expect_equal;
using ::testing::HasSubstr;
using testing::input_for;
using testing::run_ranks;

constexpr int kUnits = 3;

Chain make_chain() {
  return build([] { return Chain(kUnits); });
}

at::Tensor loss_of(Chain& model, int rank, int step) { return model(input_for(rank, step)).sum(); }

// Calls `body(model, sharded, rank)` on two ranks, with weights that stay whole between steps and
// with sharded ones.
template <typename Body>
void with_sharded(const Body& body) {
  for (const Strategy& strategy : {Strategy::optim, Strategy::optim_grads_params})
    run_ranks(2, [&](World& world) {
      const Mesh mesh = world.mesh();
      Chain model = make_chain();
      const Sharded sharded = fully_shard(model, mesh, {.strategy = strategy});
      body(model, sharded, world.rank());
    });
}

std::vector<at::Tensor> gradients_of(const Sharded& sharded) {
  std::vector<at::Tensor> gradients;
  for (const ShardedParameter& parameter : sharded.parameters())
    gradients.push_back(parameter.gradient.clone());
  return gradients;
}

// The message for code that finds no gradient in grad().
const auto kWhereGradientsAre =
    AllOf(HasSubstr("the model is sharded and so are its gradients"), HasSubstr("fsdp::AdamW"),
          HasSubstr("step.max_norm"), HasSubstr("Sharded::parameters()"));

// --- grad() --------------------------------------------------------------------------------------

TEST(Gradient, OfAParameterCannotBeReadOrReplacedAndSaysWhereItIs) {
  with_sharded([](Chain& model, const Sharded& sharded, int rank) {
    AdamW optimizer(sharded);
    loss_of(model, rank, 0).backward();
    for (const auto& item : model->named_parameters()) {
      const at::Tensor gradient = item.value().grad();
      ASSERT_TRUE(gradient.defined()) << item.key();
      EXPECT_EQ(gradient.sizes(), item.value().sizes());
      EXPECT_THAT(error_of([&] { gradient.sum(); }),
                  AllOf(HasSubstr("grad() of parameter '" + item.key() + "'"), kWhereGradientsAre));
    }
    for (at::Tensor& parameter : model->parameters())
      parameter.mutable_grad() = at::ones(parameter.sizes());
    EXPECT_THAT(error_of([&] { optimizer.step(); }), HasSubstr("was set or cleared by itself"));
  });
}

TEST(Gradient, StaysWithinReachOfAutogradForEveryUse) {
  // A parameter outside any unit, whose gradient is the first to come; and a second backward
  // through the same graph, which no forward announces.
  struct HeadImpl : torch::nn::Module {
    at::Tensor forward(const at::Tensor& x) { return chain(x) * scale; }
    Chain chain{register_module("chain", Chain(kUnits))};
    at::Tensor scale = register_parameter("scale", at::ones({3}));
  };
  for (const Strategy& strategy : {Strategy::optim_grads, Strategy::optim_grads_params})
    testing::on_sharded(
        2, [] { return std::make_shared<HeadImpl>(); }, {.strategy = strategy},
        [&](auto& model, Sharded& sharded, int rank) {
          const at::Tensor loss = model->forward(input_for(rank, 0)).sum();
          loss.backward({}, /*retain_graph=*/true);
          const std::vector<at::Tensor> once = gradients_of(sharded);
          loss.backward();
          const std::vector<at::Tensor> twice = gradients_of(sharded);
          for (size_t i = 0; i < once.size(); ++i)
            EXPECT_TRUE(at::equal(twice[i], once[i] * 2)) << i;
        });
}

// --- what torch has for plain models -------------------------------------------------------------

TEST(TorchFunctionsForGradients, FailAndNameOurs) {
  with_sharded([](Chain& model, const Sharded& sharded, int rank) {
    torch::optim::SGD sgd(model->parameters(), torch::optim::SGDOptions(0.1));
    torch::optim::AdamW adamw(model->parameters());
    loss_of(model, rank, 0).backward();
    EXPECT_THAT(
        error_of([&] { torch::nn::utils::clip_grad_norm_(model->parameters(), /*max_norm=*/1.0); }),
        kWhereGradientsAre);
    EXPECT_THAT(error_of([&] { model->zero_grad(/*set_to_none=*/false); }), kWhereGradientsAre);
    // If weights are sharded, touching one of them may fail first, with another message; libtorch
    // before 2.13 has no error for it, and AdamW's decay touches weights first.
    if (sharded.options().strategy == Strategy::optim) {
      EXPECT_THAT(error_of([&] { sgd.step(); }), kWhereGradientsAre);
      EXPECT_THAT(error_of([&] { adamw.step(); }), kWhereGradientsAre);
    } else {
      EXPECT_THAT(error_of([&] { sgd.step(); }),
                  ::testing::AnyOf(kWhereGradientsAre, HasSubstr("is touched while its unit")));
    }
  });
}

TEST(ZeroGradOfTheModule, BeginsANewCycle) {
  with_sharded([](Chain& model, const Sharded& sharded, int rank) {
    loss_of(model, rank, 1).backward();
    const std::vector<at::Tensor> expected = gradients_of(sharded);
    sharded.zero_grad();
    loss_of(model, rank, 0).backward();
    model->zero_grad();
    loss_of(model, rank, 1).backward();
    expect_equal(gradients_of(sharded), expected);
    // An optimizer of torch drops them in the same way.
    torch::optim::SGD(model->parameters(), torch::optim::SGDOptions(0.1)).zero_grad();
    loss_of(model, rank, 1).backward();
    expect_equal(gradients_of(sharded), expected);
  });
}

TEST(ZeroGradOfTheModule, LeavesNothingForAStep) {
  with_sharded([](Chain& model, const Sharded& sharded, int rank) {
    AdamW optimizer(sharded);
    loss_of(model, rank, 0).backward();
    model->zero_grad();
    EXPECT_THAT(error_of([&] { optimizer.step(); }),
                HasSubstr("step() finds no gradients in this cycle"));
  });
}

TEST(ZeroGradOfTheModule, CannotClearAPartOfTheModel) {
  with_sharded([](Chain& model, const Sharded&, int rank) {
    loss_of(model, rank, 0).backward();
    model->units[1]->zero_grad();
    EXPECT_THAT(error_of([&] { loss_of(model, rank, 1).backward(); }),
                AllOf(HasSubstr("grad() of parameter 'unit1.linear.weight' was set or cleared"),
                      HasSubstr("call zero_grad() of the optimizer")));
  });
}

// --- ours ----------------------------------------------------------------------------------------

TEST(SecondOptimizer, OfAModelIsRefusedAsLongAsTheFirstLives) {
  with_sharded([](Chain&, const Sharded& sharded, int) {
    const auto refused = AllOf(HasSubstr("the model has an optimizer already (AdamW)"),
                               HasSubstr("let go of it first"), HasSubstr("rules"));
    {
      const AdamW first(sharded);
      EXPECT_THAT(error_of([&] { AdamW again(sharded); }), refused);
      EXPECT_THAT(error_of([&] { SGD other(sharded); }), refused);
    }
    EXPECT_EQ(error_of([&] { SGD next(sharded); }), "");
    EXPECT_NE(error_of([&] { SGD wrong(sharded, {.rules = {{.pattern = "nobody"}}}); }), "");
    EXPECT_EQ(error_of([&] { AdamW after_one_that_failed(sharded); }), "");
  });
}

// --- gradients that nobody uses ------------------------------------------------------------------

// The log while `body(model, sharded)` runs on one rank.
template <typename Body>
std::string log_of(const Body& body) {
  ::testing::internal::CaptureStderr();
  run_ranks(1, [&](World& world) {
    const Mesh mesh = world.mesh();
    Chain model = make_chain();
    const Sharded sharded = fully_shard(model, mesh);
    body(model, sharded);
  });
  return ::testing::internal::GetCapturedStderr();
}

bool is_once_in(const std::string& text, const std::string& word) {
  const size_t first = text.find(word);
  return first != std::string::npos && text.find(word, first + 1) == std::string::npos;
}

TEST(UnreadGradients, AreReportedOnceWhenCyclesDropThemOrTheyAddUpForEver) {
  for (const bool has_cycles : {true, false}) {
    const std::string log = log_of([=](Chain& model, const Sharded& sharded) {
      for (int step = 0; step < 40; ++step) {
        loss_of(model, 0, step).backward();
        if (has_cycles) sharded.zero_grad();
      }
    });
    EXPECT_TRUE(is_once_in(log, "nobody has used a gradient since fully_shard()")) << log;
  }
}

TEST(UnreadGradients, AreNotReportedWhereSomebodyReadsThem) {
  EXPECT_EQ(log_of([](Chain& model, const Sharded& sharded) {
              AdamW optimizer(sharded);
              for (int step = 0; step < 40; ++step) {
                loss_of(model, 0, step).backward();
                if (step % 2 == 0) optimizer.step();
                optimizer.zero_grad();
              }
            }),
            "");
  // Read by our optimizer or otherwise, and however late in an announced long cycle.
  EXPECT_EQ(log_of([](Chain& model, const Sharded& sharded) {
              for (int step = 0; step < 80; ++step) {
                sharded.microbatch({.last = step % 40 == 39});
                loss_of(model, 0, step).backward();
                if (step % 40 == 39) testing::descend(sharded);
              }
            }),
            "");
}

}  // namespace
}  // namespace fsdp::misuse_test
