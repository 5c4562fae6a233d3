// Modules' declarations of tp, and the errors of declarations and meshes that do not fit.
#include <gmock/gmock.h>

#include <torch/nn/init.h>

#include "fsdp/base/error.h"
#include "fsdp/shard/parameter_init.h"
#include "support/parallel_training.h"

namespace fsdp::testing::tensor_cuts_test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using namespace parallel;

TEST(TensorCuts, OfMeshesThatDoNotFitShowTheArithmetic) {
  run_ranks(4, [](World& world) {
    EXPECT_THAT(error_of([&] { world.mesh({.tp = 3}); }),
                HasSubstr("tp is 3 in a world of 4 ranks = 1 outer x 4 inner: it must divide 4"));
    EXPECT_THAT(error_of([&] { world.mesh({.outer = 2, .tp = 4}); }),
                HasSubstr("tp is 4 in a world of 4 ranks = 2 outer x 2 inner: it must divide 2"));
    EXPECT_THAT(error_of([&] { world.mesh({.ep = 3, .tp = 2}); }),
                HasSubstr("ep is 3 in a world of 4 ranks = 1 outer x 2 inner x 2 tp: it must "
                          "divide 4"));
  });
}

struct AnyCutImpl : torch::nn::Module, JoinsTp {
  explicit AnyCutImpl(TpPlacement declared, const at::Tensor& value = at::ones({6, 8}))
      : placement(std::move(declared)), weight(register_parameter("weight", value)) {}
  TpPlacement tp_placement(const std::string&) const override { return placement; }
  TpPlacement placement;
  at::Tensor weight;
};

TEST(TensorCuts, AreRefusedIfRanksCannotShareThem) {
  struct Row {
    TpShard cut;
    const char* message;
  };
  const std::vector<Row> rows = {
      {{.dim = 0}, "has a size of 6 along dim 0, which tp 4 ranks cannot share evenly"},
      {{.dim = 1, .num_sections = 4}, "has a section of 2 along dim 1, which tp 4 ranks"},
      {{.dim = 1, .section_sizes = {6, 2}}, "has a section of 6 along dim 1"},
      {{.dim = 2}, "is cut over tp along dim 2; its dims are 0 to 1"},
      {{.dim = -1}, "is cut over tp along dim -1; its dims are 0 to 1"},
      {{.dim = 1, .num_sections = 3}, "has num_sections 3 along dim 1, which must divide its size"},
      {{.dim = 1, .num_sections = 0}, "has num_sections 0 along dim 1"},
      {{.dim = 1, .section_sizes = {4, 8}}, "whose sum is 12 and not 8"},
      {{.dim = 1, .num_sections = 2, .section_sizes = {4, 4}}, "declare one of the two"}};
  run_ranks(4, [&](World& world) {
    const Mesh mesh = world.mesh({.tp = 4});
    for (const Row& row : rows) {
      const auto model = std::make_shared<AnyCutImpl>(row.cut);
      EXPECT_THAT(error_of<UsageError>([&] { fully_shard(model, mesh); }),
                  AllOf(HasSubstr("parameter 'weight' of shape [6, 8]"), HasSubstr(row.message)));
      EXPECT_EQ(model->tp, nullptr);  // as it was
    }
    // Without the axis nothing is cut.
    const Mesh alone = world.mesh();
    fully_shard(std::make_shared<AnyCutImpl>(TpShard{.dim = 0}), alone);
  });
}

TEST(TensorCuts, ArePartialWhereAModuleSaysSoOfUnevenSizes) {
  run_ranks(4, [](World& world) {
    const Mesh mesh = world.mesh({.tp = 4});
    for (const auto& [dim, columns] : {std::pair{0, 8}, std::pair{1, 2}}) {
      const auto model =
          std::make_shared<AnyCutImpl>(TpShard{.dim = dim, .partial_if_uneven = true});
      const Sharded sharded = fully_shard(model, mesh);
      const auto whole = sharded.full_parameters();
      EXPECT_EQ(model->weight.sizes(), at::IntArrayRef({6, columns}));
    }
  });
}

// reset_parameters() sets all of them, though join() has come before.
TEST(TensorCuts, OfModelsOnTheMetaDeviceHaveTheWholeModelsValues) {
  struct DrawnImpl : torch::nn::Module, JoinsTp, ParameterInit {
    DrawnImpl() : weight(register_parameter("weight", at::empty({6, 8}))) { reset_parameters(); }
    TpPlacement tp_placement(const std::string&) const override {
      return TpShard{.dim = 1, .section_sizes = {2, 6}};
    }
    void reset_parameters() override { torch::nn::init::normal_(weight); }
    at::Tensor weight;
  };
  const at::Tensor whole = build([] { return std::make_shared<DrawnImpl>(); })->weight;
  run_ranks(2, [&](World& world) {
    const Mesh mesh = world.mesh({.tp = 2});
    // Rank 0 alone draws, because both share a generator.
    const auto model = [] {
      const MetaConstruction meta;
      return std::make_shared<DrawnImpl>();
    }();
    if (world.rank() == 0) torch::manual_seed(7);
    const Sharded sharded =
        fully_shard(model, mesh, {.initial_values = InitialValues::kOfRankZero});
    const auto full = sharded.full_parameters();
    const int64_t rank = world.rank();
    EXPECT_TRUE(at::equal(
        model->weight, at::cat({whole.narrow(1, rank, 1), whole.narrow(1, 2 + 3 * rank, 3)}, 1)));
  });
}

// Two modules of one parameter.
TEST(TensorCuts, AreTheSameInAllModulesOfAParameter) {
  struct TiedImpl : torch::nn::Module {
    TiedImpl(TpPlacement first, TpPlacement second)
        : one(register_module("one", std::make_shared<AnyCutImpl>(std::move(first)))),
          two(register_module("two",
                              std::make_shared<AnyCutImpl>(std::move(second), one->weight))) {}
    std::shared_ptr<AnyCutImpl> one, two;
  };
  run_ranks(2, [](World& world) {
    const Mesh mesh = world.mesh({.tp = 2});
    const auto differing =
        std::make_shared<TiedImpl>(TpShard{.dim = 1, .num_sections = 2}, TpPartial{});
    EXPECT_THAT(error_of([&] { fully_shard(differing, mesh); }),
                AllOf(HasSubstr("parameter 'two.weight' is shared with 'one.weight'"),
                      HasSubstr("'partial over tp' and 'cut over tp along dim 1 in 2 sections'")));
    const auto alike = std::make_shared<TiedImpl>(TpShard{.dim = 1}, TpShard{.dim = 1});
    const Sharded sharded = fully_shard(alike, mesh);
    const auto whole = sharded.full_parameters();
    EXPECT_EQ(alike->one->weight.size(1), 4);
    EXPECT_EQ(alike->two->weight.size(1), 4);
  });
}

TEST(TensorCuts, DoNotGoWithExpertsInOneModule) {
  struct BothImpl : torch::nn::Module, TensorParallelModule, ExpertModule {
    BothImpl() { register_parameter("weight", at::ones({2, 2})); }
    void join(const MeshAxis&) override {}
    TpPlacement tp_placement(const std::string&) const override { return TpShard{}; }
  };
  run_ranks(2, [](World& world) {
    const Mesh mesh = world.mesh({.tp = 2});
    EXPECT_THAT(error_of<UsageError>([&] { fully_shard(std::make_shared<BothImpl>(), mesh); }),
                HasSubstr("an ExpertModule and a TensorParallelModule"));
  });
}

TEST(TensorCuts, AreTheSameOnAllRanks) {
  run_ranks(2, [](World& world) {
    const Mesh mesh = world.mesh({.tp = 2});
    const auto model = std::make_shared<AnyCutImpl>(TpShard{.dim = world.rank()});
    EXPECT_THAT(error_of<UsageError>([&] { fully_shard(model, mesh); }),
                AllOf(HasSubstr("rank 1 has parameter 0"), HasSubstr("cut over tp along dim 1"),
                      HasSubstr("cut over tp along dim 0")));
  });
}

}  // namespace
}  // namespace fsdp::testing::tensor_cuts_test
