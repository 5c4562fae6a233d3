// Wrong options are one sentence, before any collective; right ones take effect.
#include <ATen/record_function.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <mutex>

#include "fsdp/base/text.h"
#include "fsdp/shard/engine/engine.h"
#include "support/run_ranks.h"
#include "support/trains_like_plain.h"

namespace fsdp::shard_options_test {
namespace {

using ::testing::AllOf;
using testing::build;
using testing::Chain;
using ::testing::Contains;
using testing::error_of;
using ::testing::HasSubstr;
using testing::kSquare;
using testing::run_ranks;

// One rank of two whose collectives are only recorded.
struct Alone {
  explicit Alone(const ShardOptions& options = {})
      : world(World::simulated(0, 2, recording)), mesh(world.mesh()), options_(options) {}

  Sharded shard() { return fully_shard(model, mesh, options_); }
  std::string refusal() {
    const std::string said = error_of([&] { shard(); });
    EXPECT_EQ(recording->size(), 1) << "refused before anything but the comparison is sent";
    EXPECT_EQ(std::count(said.begin(), said.end(), '\n'), 0) << said;
    return said;
  }

  std::shared_ptr<Recording> recording = std::make_shared<Recording>();
  World world;
  Mesh mesh;
  Chain model = build([] { return Chain(3); });

 private:
  ShardOptions options_;
};

TEST(ShardOptions, RefuseWhatMakesNoSenseInOneSentence) {
  EXPECT_THAT(Alone({.precision = {.main_params = at::kInt}}).refusal(),
              AllOf(HasSubstr("precision.main_params"), HasSubstr("Int"), HasSubstr("fp32")));
  EXPECT_THAT(Alone({.precision = {.main_grads = at::kLong}}).refusal(),
              HasSubstr("precision.main_grads"));
  EXPECT_THAT(Alone({.precision = {.grad_comm = at::kByte}}).refusal(),
              HasSubstr("precision.grad_comm"));
  EXPECT_THAT(Alone({.precision = {.grad_comm = at::kFloat8_e4m3fn}}).refusal(),
              HasSubstr("precision.grad_comm"));
  EXPECT_THAT(Alone({.prefetch = -1}).refusal(), AllOf(HasSubstr("prefetch"), HasSubstr("-1")));
  EXPECT_THAT(Alone({.pool_budget_bytes = -5}).refusal(),
              AllOf(HasSubstr("pool_budget_bytes"), HasSubstr("-5")));
  EXPECT_THAT(Alone({.device = c10::Device(c10::kMeta)}).refusal(), HasSubstr("device is meta"));
  EXPECT_THAT(Alone({.user_buffers = UserBuffers::kSymmetric}).refusal(),
              AllOf(HasSubstr("user_buffers is symmetric"), HasSubstr("NCCL"), HasSubstr("off")));
  EXPECT_THAT(
      Alone({.pool = PoolKind::kOnDemand, .user_buffers = UserBuffers::kRegistered}).refusal(),
      AllOf(HasSubstr("user_buffers is registered"), HasSubstr("on_demand")));
  Strategy illegal = Strategy::optim_grads_params;
  illegal.optimizer = {Placement::kReplicate, Placement::kReplicate};
  EXPECT_FALSE(Alone({.strategy = illegal}).refusal().empty());
}

TEST(FullyShard, RefusesUserBuffersWithOwnersOfSlices) {
  run_ranks(2, [](World& world) {
    for (const MeshOptions& options : {MeshOptions{.ep = 2}, {.tp = 2}}) {
      const Mesh mesh = world.mesh(options);
      EXPECT_THAT(error_of([&] {
                    fully_shard(torch::nn::Linear(5, 3), mesh,
                                {.user_buffers = UserBuffers::kRegistered});
                  }),
                  AllOf(HasSubstr(concat("user_buffers is registered on a mesh with ",
                                         options.ep > 1 ? "ep 2" : "tp 2")),
                        HasSubstr("set it to off")));
    }
  });
}

TEST(FullyShard, RefusesAModelThatIsShardedOrHasNothingToShard) {
  Alone alone;
  const Sharded sharded = alone.shard();
  EXPECT_THAT(error_of([&] { alone.shard(); }),
              AllOf(HasSubstr("'unit0'"), HasSubstr("already sharded")));
  torch::nn::Linear without_units(5, 3);
  const Sharded again = fully_shard(without_units, alone.mesh);
  EXPECT_THAT(error_of([&] { fully_shard(without_units, alone.mesh); }),
              HasSubstr("already sharded"));
  EXPECT_THAT(error_of([&] { fully_shard(std::make_shared<torch::nn::Module>(), alone.mesh); }),
              HasSubstr("no parameters"));
  EXPECT_THAT(error_of([&] { fully_shard(std::shared_ptr<torch::nn::Module>(), alone.mesh); }),
              HasSubstr("null"));
}

// --- precision -----------------------------------------------------------------------------------

// The types and bytes in which gradients travelled in one step.
std::vector<std::pair<at::ScalarType, int64_t>> wires(Alone& alone, const Sharded& sharded) {
  alone.recording->clear();
  kSquare(alone.model, 0, 0).backward();
  sharded.wait_gradients();
  std::vector<std::pair<at::ScalarType, int64_t>> result;
  for (const RecordedCall& call : *alone.recording)
    if (call.print.kind == OpKind::kReduceScatter)
      result.emplace_back(call.print.wire, call.print.bytes);
  sharded.zero_grad();
  return result;
}

TEST(SetPrecision, RefusesMainTypesInWords) {
  Alone alone;
  const Sharded sharded = alone.shard();
  EXPECT_THAT(error_of([&] { sharded.set_precision({.main_params = at::kDouble}); }),
              AllOf(HasSubstr("precision.main_params"), HasSubstr("fully_shard()")));
  EXPECT_THAT(error_of([&] { sharded.set_precision({.main_grads = at::kBFloat16}); }),
              HasSubstr("precision.main_grads"));
  EXPECT_THAT(error_of([&] { sharded.set_precision({.grad_comm = at::kInt}); }),
              HasSubstr("precision.grad_comm"));
  kSquare(alone.model, 0, 0).backward();
  EXPECT_THAT(error_of([&] { sharded.set_precision({.grad_comm = at::kBFloat16}); }),
              AllOf(HasSubstr("between cycles"), HasSubstr("zero_grad()")));
}

TEST(SetPrecision, NarrowsTheWireAndRefusesToWidenAFixedPoolWithNumbers) {
  for (const PoolKind kind : all_pool_kinds()) {
    Alone alone({.pool = kind});
    const Sharded sharded = alone.shard();
    const auto wide = wires(alone, sharded);
    sharded.set_precision({.grad_comm = at::kBFloat16});
    const auto narrow = wires(alone, sharded);
    sharded.set_precision({.grad_comm = at::kFloat});
    EXPECT_EQ(wires(alone, sharded), wide) << "back to what the memory was made for";
    ASSERT_EQ(wide.size(), 3u);
    ASSERT_EQ(narrow.size(), 3u);
    for (size_t i = 0; i < 3; ++i) {
      EXPECT_EQ(wide[i].first, at::kFloat);
      EXPECT_EQ(narrow[i].first, at::kBFloat16);
      EXPECT_EQ(wide[i].second, 2 * narrow[i].second);
    }
    const std::string refusal =
        error_of([&] { sharded.set_precision({.grad_comm = at::kDouble}); });
    if (kind == PoolKind::kOnDemand) {
      EXPECT_EQ(refusal, "");
      EXPECT_EQ(wires(alone, sharded).front().second, 2 * wide.front().second);
    } else {
      EXPECT_THAT(refusal, AllOf(HasSubstr("precision.grad_comm fp64 needs"), HasSubstr("bytes"),
                                 HasSubstr(std::string(name_of(kind))), HasSubstr("on_demand")));
      EXPECT_EQ(wires(alone, sharded), wide) << "a refusal changes nothing";
    }
  }
}

TEST(SetPrecision, GivesTheNumbersOfAModelThatBeganThatWay) {
  const auto weights = [](World& world, const Mesh& mesh, PoolKind kind, bool changes) {
    Chain model = build([] { return Chain(3); });
    PrecisionPolicy narrow{.grad_comm = at::kBFloat16};
    Sharded sharded =
        fully_shard(model, mesh, {.precision = changes ? PrecisionPolicy{} : narrow, .pool = kind});
    if (changes) sharded.set_precision(narrow);
    testing::train(model, sharded, world.rank(), 3, kSquare);
    return testing::weights_of(sharded, model);
  };
  for (const PoolKind kind : all_pool_kinds())
    run_ranks(2, [&](World& world) {
      const Mesh mesh = world.mesh();
      testing::expect_equal(weights(world, mesh, kind, true), weights(world, mesh, kind, false));
    });
}

// --- profilers -----------------------------------------------------------------------------------

std::mutex range_mutex;
std::vector<std::string> ranges;

TEST(ProfilerRanges, NameTheUnitThatIsGatheredOrReduced) {
  const auto handle = at::addGlobalCallback(at::RecordFunctionCallback(
      [](const at::RecordFunction& function) -> std::unique_ptr<at::ObserverContext> {
        const std::lock_guard lock(range_mutex);
        ranges.emplace_back(function.name());
        return nullptr;
      }));
  Alone alone;
  const Sharded sharded = alone.shard();
  for (int step = 0; step < 2; ++step) {
    {
      const std::lock_guard lock(range_mutex);
      ranges.clear();
    }
    kSquare(alone.model, 0, step).backward();
    testing::descend(sharded);
  }
  at::removeCallback(handle);
  for (const char* unit : {"unit0", "unit1", "unit2"}) {
    EXPECT_THAT(ranges, Contains(concat("fsdp::all_gather ", unit)));
    EXPECT_THAT(ranges, Contains(concat("fsdp::reduce ", unit)));
  }
  EXPECT_EQ(std::count(ranges.begin(), ranges.end(), "fsdp::reduce unit1"), 1);
}

}  // namespace
}  // namespace fsdp::shard_options_test
