// Experts and tp slices that options name by patterns, for modules that declare nothing: as if the
// modules had said it.
#include <gmock/gmock.h>

#include "fsdp/base/error.h"
#include "fsdp/shard/engine/engine.h"
#include "support/parallel_training.h"

namespace fsdp::testing::named_placements_test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using namespace parallel;

// --- one layer, whose modules declare what they are or leave it to patterns ----------------------

struct Silent {};

struct SaysExperts : ExpertModule {
  void join(const MeshAxis&) override {}
};

struct SaysTensors : TensorParallelModule {
  void join(const MeshAxis&) override {}
  TpPlacement tp_placement(const std::string& name) const override {
    if (name == "up") return TpShard{.dim = 0, .num_sections = 2};
    if (name == "down") return TpShard{.dim = 1};
    if (name == "norm") return TpPartial{};
    return TpEqual{};
  }
};

template <typename Says>
struct GatedMlp : torch::nn::Module, Says {
  at::Tensor up = register_parameter("up", at::rand({2 * kWide, kHidden}));
  at::Tensor down = register_parameter("down", at::rand({kHidden, kWide}));
  at::Tensor norm = register_parameter("norm", at::rand({kHidden}));
  at::Tensor bias = register_parameter("bias", at::rand({kHidden}));
};

template <typename Says>
struct ScalingExperts : torch::nn::Module, Says {
  at::Tensor weight = register_parameter("weight", at::rand({kNumExperts, kHidden}));
};

template <typename OfTensors, typename OfExperts>
struct LayerImpl : torch::nn::Module {
  at::Tensor forward(const at::Tensor& x) const { return x; }
  std::shared_ptr<GatedMlp<OfTensors>> mlp =
      register_module("mlp", std::make_shared<GatedMlp<OfTensors>>());
  std::shared_ptr<ScalingExperts<OfExperts>> experts =
      register_module("experts", std::make_shared<ScalingExperts<OfExperts>>());
};

template <typename... Says>
struct ModelImpl : torch::nn::Module {
  Unit<LayerImpl<Says...>> first = register_module("first", Unit<LayerImpl<Says...>>());
  Unit<LayerImpl<Says...>> second = register_module("second", Unit<LayerImpl<Says...>>());
};
using Declaring = ModelImpl<SaysTensors, SaysExperts>;
using Undeclared = ModelImpl<Silent, Silent>;

const ShardOptions kByName{.expert_parameters = {"*.experts.*"},
                           .tensor_parameters = {{"*.up", TpShard{.dim = 0, .num_sections = 2}},
                                                 {"*.mlp.down", TpShard{.dim = 1}},
                                                 {"*.norm", TpPartial{}},
                                                 {"*.mlp.*", TpEqual{}}}};

// --- the same as declared ------------------------------------------------------------------------

// Kind, slice and values of every parameter: what its gradient, reductions and checkpoints go by.
struct Placed {
  std::string name;
  ParameterKind kind;
  OwnedSlice owned;
  std::vector<int64_t> shape;
  int64_t begin;
  at::Tensor main_weight;
};

template <typename Model>
std::vector<Placed> placed_on(const Mesh& mesh, const ShardOptions& options) {
  const auto model = build([] { return std::make_shared<Model>(); });
  const Sharded sharded = fully_shard(model, mesh, options);
  std::vector<Placed> placed;
  for (const auto& unit : EngineAccess::of(sharded).units())
    for (const ParamGroup& group : unit->groups())
      for (int64_t i = 0; i < group.layout().num_tensors(); ++i)
        placed.push_back({group.name_of(i), group.setting().kind, group.owned_of(i),
                          group.shape_of(i), group.held_of(i).begin,
                          group.main_weights().at(group.held_flat(i)).clone()});
  return placed;
}

void expect_same(const std::vector<Placed>& actual, const std::vector<Placed>& expected,
                 const std::string& what) {
  ASSERT_EQ(actual.size(), expected.size()) << what;
  for (size_t i = 0; i < actual.size(); ++i) {
    EXPECT_EQ(actual[i].name, expected[i].name) << what;
    EXPECT_EQ(actual[i].kind, expected[i].kind) << what << " " << actual[i].name;
    EXPECT_EQ(actual[i].owned.count, expected[i].owned.count) << what << " " << actual[i].name;
    EXPECT_EQ(actual[i].owned.dim, expected[i].owned.dim) << what << " " << actual[i].name;
    EXPECT_EQ(actual[i].owned.sections, expected[i].owned.sections) << actual[i].name;
    EXPECT_EQ(actual[i].shape, expected[i].shape) << what << " " << actual[i].name;
    EXPECT_EQ(actual[i].begin, expected[i].begin) << what << " " << actual[i].name;
    EXPECT_TRUE(at::equal(actual[i].main_weight, expected[i].main_weight)) << actual[i].name;
  }
}

// Patterns may repeat what modules declare.
TEST(NamedPlacements, AreThoseThatModulesDeclare) {
  const std::vector<Grids> all = {
      {2, {.ep = 2}}, {2, {.tp = 2}}, {4, {.ep = 2, .tp = 2}}, {4, {.outer = 2, .ep = 4}}, {4, {}}};
  for (const Grids& grids : all)
    run_ranks(grids.ranks, [&](World& world) {
      const Mesh mesh = world.mesh(grids.mesh);
      const std::vector<Placed> declared = placed_on<Declaring>(mesh, {});
      expect_same(placed_on<Undeclared>(mesh, kByName), declared, text(grids));
      expect_same(placed_on<Declaring>(mesh, kByName), declared, text(grids) + ", repeated");
    });
}

TEST(NamedPlacements, CountOnceOfSeveralThatMatch) {
  run_ranks(2, [](World& world) {
    const Mesh mesh = world.mesh({.tp = 2});
    auto model = build([] { return std::make_shared<Undeclared>(); });
    const Sharded sharded = fully_shard(
        model, mesh, {.tensor_parameters = {{"first.mlp.up", TpPartial{}}, {"*.up", TpShard{}}}});
    const auto whole = sharded.full_parameters();
    EXPECT_EQ(model->first->mlp->up.size(0), 2 * kWide);
    EXPECT_EQ(model->second->mlp->up.size(0), kWide);
  });
}

// --- errors --------------------------------------------------------------------------------------

TEST(NamedPlacements, ThatCannotBeAreRefused) {
  struct Row {
    ShardOptions options;
    const char* message;
  };
  const std::vector<Row> rows = {
      {{.expert_parameters = {"*.expert.*"}},
       "expert_parameters has '*.expert.*', which matches no parameter; did you mean "
       "'first.experts.weight'?"},
      {{.tensor_parameters = {{"*.upp"}}}, "tensor_parameters has '*.upp', which matches no"},
      {{.expert_parameters = {"first.mlp.bias"}},
       "parameter 'first.mlp.bias' of shape [6] has one slice per expert, 6, which ep 4 ranks "
       "cannot share evenly (6 = 4 x 1 + 2); choose an ep that divides the number of experts"},
      {{.expert_parameters = {"*.mlp.up"}, .tensor_parameters = {{"*.up"}}},
       "parameter 'first.mlp.up' is 'of experts' by the pattern '*.mlp.up' in expert_parameters "
       "and 'cut over tp along dim 0' by the pattern '*.up' in tensor_parameters; it can be cut "
       "over one of ep and tp"}};
  run_ranks(4, [&](World& world) {
    const Mesh mesh = world.mesh({.ep = 4, .tp = 2});
    for (const Row& row : rows)
      EXPECT_THAT(error_of<UsageError>([&] {
                    fully_shard(build([] { return std::make_shared<Undeclared>(); }), mesh,
                                row.options);
                  }),
                  HasSubstr(row.message));
    EXPECT_THAT(error_of<UsageError>([&] {
                  fully_shard(build([] { return std::make_shared<Declaring>(); }), mesh,
                              {.expert_parameters = {"*.down"}});
                }),
                AllOf(HasSubstr("parameter 'first.mlp.down' is 'cut over tp along dim 1' by its "
                                "module and 'of experts' by the pattern '*.down'"),
                      HasSubstr("narrow the pattern")));
  });
}

TEST(NamedPlacements, OfAScalarExpertAreRefused) {
  run_ranks(2, [](World& world) {
    const Mesh mesh = world.mesh({.ep = 2});
    auto model = std::make_shared<torch::nn::Module>();
    model->register_parameter("scale", at::ones({}));
    EXPECT_THAT(
        error_of<UsageError>([&] { fully_shard(model, mesh, {.expert_parameters = {"scale"}}); }),
        HasSubstr("parameter 'scale' of shape [] has no dimension, but one slice per expert"));
  });
}

}  // namespace
}  // namespace fsdp::testing::named_placements_test
