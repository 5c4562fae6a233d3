// Experts and tp slices that options name by patterns, for modules that declare nothing: as if the
// modules had said it.
#include <gmock/gmock.h>

#include "fsdp/base/error.h"
#include "support/parallel_training.h"

namespace fsdp::testing::named_placements_test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using namespace parallel;

// --- one layer, whose modules declare what they are or leave it to patterns ----------------------

struct Silent {
  const MeshAxis* axis = nullptr;
};

struct SaysExperts : ExpertModule, Silent {
  void join(const MeshAxis& ep) override { axis = &ep; }
};

struct SaysTensors : TensorParallelModule, Silent {
  void join(const MeshAxis& tp) override { axis = &tp; }
  TpPlacement tp_placement(const std::string& name) const override {
    if (name == "up") return TpShard{.dim = 0, .num_sections = 2};
    if (name == "down") return TpShard{.dim = 1};
    return TpEqual{};
  }
};

template <typename Says>
struct GatedMlp : torch::nn::Module, Says {
  GatedMlp()
      : up(register_parameter("up", at::rand({2 * kWide, kHidden}) - 0.5)),
        down(register_parameter("down", at::rand({kHidden, kWide}) - 0.5)),
        bias(register_parameter("bias", at::rand({kHidden}))) {}
  at::Tensor forward(const at::Tensor& x) const {
    const std::vector<at::Tensor> parts =
        at::linear(along<as_is, summed>(this->axis, x), up).chunk(2, 1);
    const at::Tensor part = at::linear(at::sigmoid(parts[0]) * parts[1], down);
    return along<summed, as_is>(this->axis, part) + bias;
  }
  at::Tensor up, down, bias;
};

template <typename Says>
struct ScalingExperts : torch::nn::Module, Says {
  ScalingExperts() : weight(register_parameter("weight", at::rand({kNumExperts, kHidden}) + 0.5)) {}
  at::Tensor forward(const at::Tensor& rows, const at::Tensor& expert) const {
    const MeshAxis* ep = this->axis;
    if (ep == nullptr) return rows * weight.index_select(0, expert);
    const at::Tensor all = along<gathered, scattered>(ep, rows);
    const at::Tensor local = gathered(*ep, expert) - ep->rank() * weight.size(0);
    const at::Tensor mine = local.ge(0).logical_and(local.lt(weight.size(0))).nonzero().view({-1});
    const at::Tensor computed =
        all.index_select(0, mine) * weight.index_select(0, local.index_select(0, mine));
    return along<scattered, gathered>(ep, at::zeros_like(all).index_copy(0, mine, computed));
  }
  at::Tensor weight;
};

template <typename OfTensors, typename OfExperts>
struct LayerImpl : torch::nn::Module {
  LayerImpl()
      : mlp(register_module("mlp", std::make_shared<GatedMlp<OfTensors>>())),
        experts(register_module("experts", std::make_shared<ScalingExperts<OfExperts>>())) {}
  // Tokens of experts are divided among the ranks of a tp group.
  at::Tensor forward(const at::Tensor& x) const {
    const MeshAxis* tp = mlp->axis;
    const at::Tensor hidden = mlp->forward(x);
    at::Tensor expert = (at::arange(kTokens) * 3).remainder(kNumExperts);
    if (tp != nullptr) expert = own_rows(*tp, expert);
    const at::Tensor own = along<own_rows, gathered>(tp, hidden);
    return along<gathered, own_rows>(tp, own + experts->forward(own, expert));
  }
  std::shared_ptr<GatedMlp<OfTensors>> mlp;
  std::shared_ptr<ScalingExperts<OfExperts>> experts;
};

struct DeclaringImpl : LayerImpl<SaysTensors, SaysExperts> {
  void find_ranks(const Mesh&) {}
};
TORCH_MODULE(Declaring);

struct UndeclaredImpl : LayerImpl<Silent, Silent> {
  void find_ranks(const Mesh& mesh) {
    mlp->axis = mesh.tp();
    experts->axis = mesh.ep();
  }
};
TORCH_MODULE(Undeclared);

template <typename Layer>
struct ModelImpl : torch::nn::Module {
  ModelImpl()
      : first(register_module("first", Unit<Layer>())),
        second(register_module("second", Unit<Layer>())) {}
  at::Tensor forward(const at::Tensor& x) { return second(first(x)); }
  Unit<Layer> first, second;
};

const ShardOptions kByName{.expert_parameters = {"*.experts.*"},
                           .tensor_parameters = {{"*.up", TpShard{.dim = 0, .num_sections = 2}},
                                                 {"*.mlp.down", TpShard{.dim = 1}},
                                                 {"*.mlp.*", TpEqual{}}}};

// --- the same as declared ------------------------------------------------------------------------

struct Trained {
  std::vector<ShardedParameter> parameters;
  MemoryReport memory;
};

template <typename Layer>
Trained train_three_steps(const Mesh& mesh, const ShardOptions& options) {
  auto model = build([] { return std::make_shared<ModelImpl<Layer>>(); });
  model->first->find_ranks(mesh);
  model->second->find_ranks(mesh);
  const Sharded sharded = fully_shard(model, mesh, options);
  AdamW optimizer(sharded, kParallelAdamW);
  for (int step = 0; step < 3; ++step) {
    model->forward(input_for(mesh.loss(), step, {kTokens, kHidden})).square().mean().backward();
    optimizer.step();
    optimizer.zero_grad();
  }
  optimizer.wait();
  Trained result{sharded.parameters(), sharded.memory()};
  for (ShardedParameter& each : result.parameters) each.main_weight = each.main_weight.clone();
  return result;
}

TEST(NamedPlacements, AreThoseThatModulesDeclare) {
  const std::vector<Grids> all = {
      {2, {.ep = 2}}, {2, {.tp = 2}}, {4, {.ep = 2, .tp = 2}}, {4, {.outer = 2, .ep = 4}}, {4, {}}};
  for (const Grids& grids : all)
    run_ranks(grids.ranks, [&](World& world) {
      const Mesh mesh = world.mesh(grids.mesh);
      const Trained declared = train_three_steps<Declaring>(mesh, {});
      const Trained named = train_three_steps<Undeclared>(mesh, kByName);
      ASSERT_EQ(named.parameters.size(), declared.parameters.size());
      for (size_t i = 0; i < named.parameters.size(); ++i) {
        const ShardedParameter& mine = named.parameters[i];
        const ShardedParameter& theirs = declared.parameters[i];
        EXPECT_EQ(mine.name, theirs.name);
        EXPECT_EQ(mine.shape, theirs.shape) << text(grids) << " " << mine.name;
        EXPECT_EQ(mine.begin, theirs.begin);
        EXPECT_TRUE(at::equal(mine.main_weight, theirs.main_weight))
            << text(grids) << " " << mine.name;
      }
      EXPECT_EQ(named.memory.text(), declared.memory.text());
    });
}

TEST(NamedPlacements, MayRepeatWhatModulesDeclare) {
  run_ranks(4, [&](World& world) {
    const Mesh mesh = world.mesh({.ep = 2, .tp = 2});
    EXPECT_EQ(train_three_steps<Declaring>(mesh, kByName).memory.text(),
              train_three_steps<Declaring>(mesh, {}).memory.text());
  });
}

TEST(NamedPlacements, CountOnceOfSeveralThatMatch) {
  run_ranks(2, [](World& world) {
    const Mesh mesh = world.mesh({.tp = 2});
    auto model = build([] { return std::make_shared<ModelImpl<Undeclared>>(); });
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
                    fully_shard(build([] { return std::make_shared<ModelImpl<Undeclared>>(); }),
                                mesh, row.options);
                  }),
                  HasSubstr(row.message));
    EXPECT_THAT(error_of<UsageError>([&] {
                  fully_shard(build([] { return std::make_shared<ModelImpl<Declaring>>(); }), mesh,
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
