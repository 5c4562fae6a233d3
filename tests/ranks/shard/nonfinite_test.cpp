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

TEST(FoundNonfinite, SeesAnInfinityWithoutCollectivesAndThroughANarrowWire) {
  for (const int ranks : {1, 2})
    for (const Strategy& strategy : {Strategy::no_shard, Strategy::optim_grads_params})
      on_sharded_chain(ranks, {.strategy = strategy, .precision = {.grad_comm = at::kBFloat16}},
                       [&](Chain& model, Sharded& sharded, int rank) {
                         loss_of(model, rank, 0, -1).backward();
                         EXPECT_FALSE(sharded.found_nonfinite()) << to_text(strategy);
                         sharded.zero_grad();
                         loss_of(model, rank, 1, ranks - 1).backward();
                         EXPECT_TRUE(sharded.found_nonfinite()) << to_text(strategy);
                         sharded.zero_grad();  // the step is skipped
                         loss_of(model, rank, 2, -1).backward();
                         EXPECT_FALSE(sharded.found_nonfinite()) << "forgotten with the gradients";
                       });
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
  at::Tensor forward(const at::Tensor& x) { return at::tanh(linear(x)); }
  nn::Linear linear = register_module("linear", nn::Linear(5, 5));
};

struct NetImpl : torch::nn::Module {
  at::Tensor forward(const at::Tensor& x) { return second(first(x)); }
  Unit<DirectImpl> first = register_module("first", Unit<DirectImpl>());
  Unit<testing::Block> second = register_module("second", Unit<testing::Block>(5, 3));
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

// A layer's own writes, and values that only the wire cannot hold: fp16 ends at 65504.
TEST(ReportNan, SeesWhatTravels) {
  run_ranks(2, [](World& world) {
    const Mesh mesh = world.mesh();
    const auto words = [&](at::ScalarType wire, const auto& loss) {
      Net model = build([] { return Net(); });
      const Sharded sharded = fully_shard(
          model, mesh, {.precision = {.grad_comm = wire}, .report_nan = ReportNan::kPerParameter});
      return error_of([&] { loss(model).backward(); });
    };
    const auto direct = [&](Net& model) { return model->first(input_for(world.rank(), 0)).sum(); };
    EXPECT_THAT(words(at::kFloat, [&](Net& model) { return direct(model) * kInf; }),
                AllOf(HasSubstr("'first.linear."), HasSubstr("not finite")));
    EXPECT_THAT(words(at::kHalf, [&](Net& model) { return kSquare(model, world.rank(), 0) * 1e8; }),
                HasSubstr("not finite"));
  });
}

}  // namespace
}  // namespace fsdp::nonfinite_test
