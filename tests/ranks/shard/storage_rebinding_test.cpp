// Parameters as views of memory that comes and goes.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <sstream>

#include "fsdp/shard/engine/engine.h"
#include "support/run_ranks.h"
#include "support/sharded_training.h"
#include "support/watched_memory.h"

namespace fsdp::storage_rebinding_test {
namespace {

using ::testing::AllOf;
using testing::build;
using testing::Chain;
using testing::error_of;
using ::testing::HasSubstr;
using testing::input_for;
using testing::on_sharded_chain;
using testing::run_ranks;

at::Tensor square_loss(Chain& model, int rank, int step) {
  return model(input_for(rank, step)).square().mean();
}

TEST(StorageRebinding, ParametersLieInTheSlabWhileTheirUnitComputes) {
  on_sharded_chain(2, {}, [](Chain& model, Sharded& sharded, int rank) {
    int num_seen = 0;
    for (size_t i = 0; i < 3; ++i) {
      model->units[i]->inside = [&, i](testing::BlockImpl& block) {
        const ParamGroup& group = EngineAccess::of(sharded).units()[i]->groups()[0];
        const auto* begin = static_cast<const std::byte*>(group.slabs().weight->address());
        const auto* end = begin + group.slabs().weight->num_bytes();
        for (const at::Tensor& parameter : block.parameters()) {
          const auto* address = static_cast<const std::byte*>(parameter.const_data_ptr());
          EXPECT_TRUE(address >= begin && address + parameter.nbytes() <= end) << "unit " << i;
          ++num_seen;
        }
      };
    }
    square_loss(model, rank, 0).backward();
    EXPECT_EQ(num_seen, 6);
  });
}

TEST(StorageRebinding, ViewsSavedByAutogradFollowToOtherMemory) {
  const auto expected = testing::train_plain(build([] { return Chain(4); }), 2, 3, square_loss);
  run_ranks(2, [&](World& world) {
    // Freed memory is full of NaN and never used again, so each gather has another address.
    testing::OnceOnlyAllocator memory;
    const Mesh mesh = world.mesh();
    Chain model = build([] { return Chain(4); });
    Sharded sharded = fully_shard(model, mesh, {.pool = PoolKind::kOnDemand, .allocator = &memory});
    std::map<int, std::vector<const void*>> addresses;
    model->units[1]->inside = [&](testing::BlockImpl& block) {
      addresses[0].push_back(block.linear->weight.const_data_ptr());
    };
    testing::train(model, sharded, world.rank(), 3, square_loss);
    EXPECT_NE(addresses[0][0], addresses[0][1]);
    testing::expect_equal(testing::weights_of(sharded, model), expected);
  });
}

TEST(StorageRebinding, TouchingAShardedParameterNamesItAndItsUnit) {
  on_sharded_chain(2, {}, [](Chain& model, Sharded& sharded, int rank) {
    const auto expect_refused = [&](const char* what, const auto& touch) {
      const at::NoGradGuard no_grad;
      EXPECT_THAT(error_of([&] { touch(model->units[1]->linear->weight); }),
                  AllOf(HasSubstr("'unit1.linear.weight'"), HasSubstr("unit 'unit1'"),
                        HasSubstr("is sharded"), HasSubstr("full_parameters()")))
          << what;
    };
    const auto refuse_all = [&] {
      expect_refused("sum", [](at::Tensor& p) { p.sum(); });
      expect_refused("item", [](at::Tensor& p) { p[0][0].item<float>(); });
      expect_refused("print", [](at::Tensor& p) { std::ostringstream() << p; });
      expect_refused("copy_", [](at::Tensor& p) { p.copy_(at::ones_like(p)); });
      expect_refused("zero_", [](at::Tensor& p) { p.zero_(); });
      expect_refused("clone", [](at::Tensor& p) { p.clone(); });
      expect_refused("matmul", [](at::Tensor& p) { at::mm(at::ones({2, 7}), p); });
      expect_refused("data_ptr", [](at::Tensor& p) { p.data_ptr(); });
      expect_refused("a view", [](at::Tensor& p) { p.t().contiguous(); });
    };
    refuse_all();
    testing::train(model, sharded, rank, 2, square_loss);
    refuse_all();  // and again after it was whole
    {
      const auto whole = sharded.full_parameters();
      EXPECT_EQ(model->units[1]->linear->weight.sum().dim(), 0);
    }
    refuse_all();
  });
}

TEST(StorageRebinding, ShapesAndVersionsOfShardedParametersStay) {
  run_ranks(2, [](World& world) {
    const Mesh mesh = world.mesh();
    Chain model = build([] { return Chain(3); });
    const at::Tensor held_before = model->units[0]->linear->weight;
    const Sharded sharded = fully_shard(model, mesh);
    const at::Tensor& parameter = model->units[0]->linear->weight;
    const int64_t version = parameter._version();
    testing::train(model, sharded, world.rank(), 3, square_loss);
    EXPECT_EQ(parameter._version(), version) << "gathers do not touch it";
    EXPECT_EQ(parameter.sizes(), (at::IntArrayRef{7, 5}));
    EXPECT_TRUE(parameter.requires_grad() && parameter.is_leaf() && parameter.is_contiguous());
    EXPECT_TRUE(held_before.is_same(parameter)) << "whoever held the parameter still holds it";
  });
}

TEST(StorageRebinding, GroupsOfOneRankGatherWithoutACopy) {
  for (const int outer : {1, 2}) {
    auto recording = std::make_shared<Recording>();
    World world = World::simulated(0, outer, recording);
    const Mesh mesh = world.mesh({.outer = outer});
    Chain model = build([] { return Chain(3); });
    Sharded sharded = fully_shard(model, mesh);
    EXPECT_EQ(EngineAccess::of(sharded).weights().pool(), nullptr);
    int num_seen = 0;
    model->units[1]->inside = [&](testing::BlockImpl& block) {
      const ParamGroup& group = EngineAccess::of(sharded).units()[1]->groups()[0];
      const at::Tensor& shard = group.main_weights().pieces().front().weight;
      EXPECT_EQ(block.linear->weight.const_data_ptr(), shard.const_data_ptr());
      ++num_seen;
    };
    square_loss(model, 0, 0).backward();
    testing::descend(sharded);
    square_loss(model, 0, 1).backward();
    EXPECT_EQ(num_seen, 2);
    for (const RecordedCall& call : *recording) EXPECT_NE(call.print.kind, OpKind::kAllGather);
  }
}

}  // namespace
}  // namespace fsdp::storage_rebinding_test
