// NaN and Inf in gradients: found on request, or named before they travel.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>

#include "fsdp/nn/layers/linear.h"
#include "fsdp/shard/engine/engine.h"
#include "support/run_ranks.h"
#include "support/sharded_training.h"

namespace fsdp::nonfinite_test {
namespace {

using ::testing::AllOf;
using testing::build;
using testing::Chain;
using testing::error_of;
using ::testing::HasSubstr;
using testing::input_for;
using testing::on_sharded_chain;
using testing::run_ranks;

constexpr float kInf = std::numeric_limits<float>::infinity();

// A loss whose gradient is not finite on one rank only.
at::Tensor loss_of(Chain& model, int rank, int step, int bad_rank) {
  const at::Tensor loss = model(input_for(rank, step)).square().mean();
  return rank == bad_rank ? loss * kInf : loss;
}

TEST(FoundNonfinite, SeesOneRanksInfinityOnAllRanksUnderEveryStrategy) {
  for (const char* strategy : {"no_shard", "optim", "optim_grads", "optim_grads_params",
                               "optim_grads_params+hfsdp", "optim+hfsdp"}) {
    for (const auto& [outer, inner] : {std::pair{1, 1}, {1, 2}, {2, 1}, {2, 2}}) {
      for (const auto wire : {at::kFloat, at::kBFloat16}) {
        run_ranks(outer * inner, [&, outer = outer](World& world) {
          const Mesh mesh = world.mesh({.outer = outer});
          Chain model = build([] { return Chain(3); });
          Sharded sharded =
              fully_shard(model, mesh,
                          {.strategy = parse_strategy(strategy), .precision = {.grad_comm = wire}});
          loss_of(model, world.rank(), 0, -1).backward();
          EXPECT_FALSE(sharded.found_nonfinite()) << strategy;
          testing::descend(sharded);
          loss_of(model, world.rank(), 1, world.size() - 1).backward();
          EXPECT_TRUE(sharded.found_nonfinite()) << strategy << " on " << world.size();
          sharded.zero_grad();  // the step is skipped
          loss_of(model, world.rank(), 2, -1).backward();
          EXPECT_FALSE(sharded.found_nonfinite()) << strategy << ": forgotten with the gradients";
        });
      }
    }
  }
}

TEST(FoundNonfinite, RemembersAnEarlierMicrobatch) {
  on_sharded_chain(2, {}, [](Chain& model, Sharded& sharded, int rank) {
    {
      const auto guard = sharded.no_sync();
      loss_of(model, rank, 0, 0).backward();
    }
    loss_of(model, rank, 1, -1).backward();
    EXPECT_TRUE(sharded.found_nonfinite());
  });
}

struct DirectImpl : torch::nn::Module {
  DirectImpl() : linear(register_module("linear", nn::Linear(5, 5))) {}
  at::Tensor forward(const at::Tensor& x) { return at::tanh(linear(x)); }
  nn::Linear linear;
};

struct NetImpl : torch::nn::Module {
  NetImpl()
      : first(register_module("first", Unit<DirectImpl>())),
        second(register_module("second", Unit<testing::Block>(5, 3))) {}
  at::Tensor forward(const at::Tensor& x) { return second(first(x)); }
  Unit<DirectImpl> first;
  Unit<testing::Block> second;
};
TORCH_MODULE(Net);

const auto kSquare = [](Net& model, int rank, int step) {
  return model(input_for(rank, step)).square().mean();
};

TEST(ReportNan, NamesParameterRankAndMicrobatchBeforeAnythingTravels) {
  const auto expected = testing::train_plain(build([] { return Net(); }), 2, 2, kSquare);
  for (const Strategy& strategy : {Strategy::optim, Strategy::optim_grads_params}) {
    run_ranks(2, [&](World& world) {
      const Mesh mesh = world.mesh();
      Net model = build([] { return Net(); });
      Sharded sharded =
          fully_shard(model, mesh, {.strategy = strategy, .report_nan = ReportNan::kPerParameter});
      sharded.microbatch({.last = false});
      kSquare(model, world.rank(), 0).backward();
      sharded.microbatch({.last = true});
      const std::string said =
          error_of([&] { (kSquare(model, world.rank(), 1) * kInf).backward(); });
      EXPECT_THAT(said, AllOf(HasSubstr("'second.linear."), HasSubstr("unit 'second'"),
                              HasSubstr("rank " + std::to_string(world.rank())),
                              HasSubstr("microbatch 1"), HasSubstr("has not been sent")));
      EXPECT_FALSE(error_of([&] { kSquare(model, world.rank(), 1); }).empty())
          << "an unfinished backward is not forgotten";
      sharded.reset();
      testing::train(model, sharded, world.rank(), 2, kSquare);
      testing::expect_equal(testing::weights_of(sharded, model), expected, to_text(strategy));
    });
  }
}

TEST(ReportNan, SeesGradientsThatLayersWroteThemselves) {
  run_ranks(2, [](World& world) {
    const Mesh mesh = world.mesh();
    Net model = build([] { return Net(); });
    Sharded sharded = fully_shard(model, mesh, {.report_nan = ReportNan::kPerParameter});
    const std::string said = error_of([&] {
      const at::Tensor hidden = model->first(input_for(world.rank(), 0));
      (hidden * kInf).sum().backward();
    });
    EXPECT_THAT(said, AllOf(HasSubstr("'first.linear."), HasSubstr("not finite")));
  });
}

TEST(ReportNan, SeesAValueThatOnlyTheWireCannotHold) {
  run_ranks(2, [](World& world) {
    const Mesh mesh = world.mesh();
    Net model = build([] { return Net(); });
    Sharded sharded = fully_shard(
        model, mesh,
        {.precision = {.grad_comm = at::kHalf}, .report_nan = ReportNan::kPerParameter});
    const std::string said = error_of([&] { (kSquare(model, world.rank(), 0) * 1e8).backward(); });
    EXPECT_THAT(said, HasSubstr("not finite")) << "fp16 ends at 65504";
  });
}

}  // namespace
}  // namespace fsdp::nonfinite_test
