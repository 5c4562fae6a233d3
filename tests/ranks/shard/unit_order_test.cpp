// The order in which units compute: learned, followed, overruled, changed.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>

#include "fsdp/shard/engine/engine.h"
#include "support/run_ranks.h"
#include "support/sharded_training.h"

namespace fsdp::unit_order_test {
namespace {

using testing::build;
using ::testing::ElementsAre;
using testing::error_of;
using ::testing::HasSubstr;
using testing::input_for;
using testing::run_ranks;

// Units that are called in any order.
struct FreeImpl : torch::nn::Module {
  explicit FreeImpl(int num_units) {
    for (int i = 0; i < num_units; ++i)
      units.push_back(register_module("unit" + std::to_string(i), Unit<testing::Block>(5, 5)));
  }
  at::Tensor forward(at::Tensor x, const std::vector<size_t>& order) {
    for (const size_t i : order) x = units[i](x);
    return x;
  }
  std::vector<Unit<testing::Block>> units;
};
TORCH_MODULE(Free);

// A model in a simulated world of two ranks, with the gathers before each unit's computation.
class Watched {
 public:
  Watched(int num_units, const ShardOptions& options)
      : world_(World::simulated(0, 2, recording_)),
        mesh_(world_.mesh()),
        model(build([&] { return Free(num_units); })),
        sharded(fully_shard(model, mesh_, options)) {
    for (size_t i = 0; i < model->units.size(); ++i)
      model->units[i]->inside = [this, i](testing::BlockImpl&) { gathered_at[i] = gathered(); };
  }

  // One step; returns nothing, see gathered_at.
  void step(const std::vector<size_t>& order) {
    recording_->clear();
    model(input_for(0, 0), order).sum().backward();
    all = gathered();
    testing::descend(sharded);
  }

  // Names of the units gathered so far in this step, in order.
  std::vector<std::string> gathered() const {
    std::vector<std::string> names;
    for (const RecordedCall& call : *recording_) {
      if (call.print.kind != OpKind::kAllGather) continue;
      const std::string_view tag = call.print.tag.text();
      names.emplace_back(tag.substr(0, tag.find(' ')));
    }
    return names;
  }

 private:
  std::shared_ptr<Recording> recording_ = std::make_shared<Recording>();
  World world_;
  Mesh mesh_;

 public:
  Free model;
  Sharded sharded;
  std::map<size_t, std::vector<std::string>> gathered_at;  // by unit, in its forward
  std::vector<std::string> all;                            // of the last step
};

TEST(UnitOrder, IsLearnedInTheFirstStepAndPrefetchedInTheSecond) {
  Watched watched(4, {});
  const std::vector<size_t> order = {2, 0, 3, 1};
  watched.step(order);
  watched.step(order);
  EXPECT_THAT(watched.gathered_at[2], ElementsAre("unit2", "unit0"));
  EXPECT_THAT(watched.gathered_at[0], ElementsAre("unit2", "unit0", "unit3"));
  EXPECT_THAT(watched.gathered_at[3], ElementsAre("unit2", "unit0", "unit3", "unit1"));
  EXPECT_THAT(watched.gathered_at[1], ElementsAre("unit2", "unit0", "unit3", "unit1"))
      << "backward begins with unit1, which is there";
  EXPECT_THAT(watched.sharded.unit_order(),
              ElementsAre("unit2", "unit0", "unit3", "unit1", "unit1", "unit3", "unit0", "unit2"));
  EXPECT_EQ(watched.all.size(), 7u) << "the last unit of the forward stays for the backward";
}

TEST(UnitOrder, OfTheUserWins) {
  Watched watched(4, {.pool = PoolKind::kOnDemand});
  watched.step({0, 1, 2, 3});
  watched.sharded.set_prefetch("unit0", {"unit3", "unit1"}, PrefetchIn::kForward);
  watched.sharded.set_prefetch("unit1", {}, PrefetchIn::kForward);
  watched.step({0, 1, 2, 3});
  EXPECT_THAT(watched.gathered_at[0], ElementsAre("unit0", "unit3", "unit1"));
  EXPECT_THAT(watched.gathered_at[1], ElementsAre("unit0", "unit3", "unit1"))
      << "nothing ahead of unit1";
  EXPECT_THAT(watched.gathered_at[2], ElementsAre("unit0", "unit3", "unit1", "unit2"));
  EXPECT_THAT(error_of([&] { watched.sharded.set_prefetch("unit9", {}, PrefetchIn::kForward); }),
              HasSubstr("unit 'unit9' does not exist"));
}

TEST(UnitOrder, OfTheUserNeverTakesMoreThanThePoolHas) {
  Watched watched(4, {.pool = PoolKind::kMaxPool});
  watched.sharded.set_prefetch("unit0", {"unit1", "unit2", "unit3"}, PrefetchIn::kForward);
  for (int step = 0; step < 3; ++step) {
    watched.step({0, 1, 2, 3});
    EXPECT_THAT(watched.gathered_at[0], ElementsAre("unit0", "unit1"));
  }
  EXPECT_EQ(EngineAccess::of(watched.sharded).weights().num_misses(), 0);
}

TEST(UnitOrder, ThatChangesIsReportedOnceAndFollowed) {
  ::testing::internal::CaptureStderr();
  {
    Watched watched(4, {});
    watched.step({0, 1, 2, 3});
    watched.step({0, 1, 2, 3});
    watched.step({0, 2, 1, 3});
    EXPECT_EQ(watched.all.size(), 9u) << "every use by itself, and one wrong guess";
    watched.step({0, 1, 2, 3});
    watched.step({3, 1});
    watched.step({0, 2, 1, 3});
    watched.step({0, 2, 1, 3});  // twice the same: adopted
    watched.step({0, 2, 1, 3});
    EXPECT_THAT(watched.gathered_at[0], ElementsAre("unit0", "unit2"));
  }
  const std::string said = ::testing::internal::GetCapturedStderr();
  const std::string sentence = "the order of units changed";
  const size_t first = said.find(sentence);
  EXPECT_NE(first, std::string::npos) << said;
  EXPECT_EQ(said.find(sentence, first + 1), std::string::npos) << said;
  EXPECT_THAT(said, HasSubstr("use 2 was 'unit2' and used to be 'unit1'"));
}

TEST(UnitOrder, ThatChangesGivesTheRightNumbers) {
  // Layers that come and go from step to step, in every kind of pool.
  const auto loss = [](Free& model, int rank, int step) {
    const std::vector<std::vector<size_t>> orders = {
        {0, 1, 2, 3}, {0, 2, 1, 3}, {3}, {0, 1, 2, 3, 1}, {1, 0}, {1, 0}, {0, 1, 2, 3}};
    return model(input_for(rank, step), orders[static_cast<size_t>(step)]).square().mean();
  };
  const auto expected = testing::train_plain(build([] { return Free(4); }), 2, 7, loss);
  for (const PoolKind kind : all_pool_kinds()) {
    testing::on_sharded(
        2, [] { return Free(4); }, {.pool = kind},
        [&](Free& model, Sharded& sharded, int rank) {
          testing::train(model, sharded, rank, 7, loss);
          testing::expect_close(testing::weights_of(sharded, model), expected,
                                std::string(name_of(kind)));
        });
  }
}

}  // namespace
}  // namespace fsdp::unit_order_test
