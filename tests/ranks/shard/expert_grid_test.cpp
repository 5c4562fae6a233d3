// Experts that ranks share out: the grid of their parameters, and the same training as unsharded.
#include <gmock/gmock.h>
#include <torch/csrc/autograd/custom_function.h>

#include <cmath>

#include "fsdp/checkpoint/checkpointer.h"
#include "fsdp/checkpoint/load.h"
#include "fsdp/comm/communicator.h"
#include "fsdp/optim/adamw.h"
#include "fsdp/optim/sgd.h"
#include "fsdp/shard/parallel_module.h"
#include "support/sharded_training.h"
#include "support/temp_dir.h"

namespace fsdp::testing::expert_grid_test {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

constexpr int64_t kExperts = 8;
constexpr int64_t kRows = 6;
constexpr int64_t kWidth = 5;

at::Tensor gathered(const MeshAxis& ep, const at::Tensor& rows) {
  at::Tensor all = at::empty({rows.size(0) * ep.size(), rows.size(1)}, rows.options());
  ep.gather().all_gather(all, rows.contiguous(), "rows").wait();
  return all;
}

at::Tensor scattered(const MeshAxis& ep, const at::Tensor& rows) {
  at::Tensor own = at::empty({rows.size(0) / ep.size(), rows.size(1)}, rows.options());
  ep.reduce().reduce_scatter(own, rows.contiguous(), {}, "rows").wait();
  return own;
}

// The rows of all ranks of the group, and the way back, whose gradients go the other way.
template <at::Tensor (*kThere)(const MeshAxis&, const at::Tensor&),
          at::Tensor (*kBack)(const MeshAxis&, const at::Tensor&)>
struct Exchange : torch::autograd::Function<Exchange<kThere, kBack>> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& rows, int64_t axis) {
    context->saved_data["axis"] = axis;
    return kThere(*reinterpret_cast<const MeshAxis*>(axis), rows);
  }
  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const int64_t axis = context->saved_data["axis"].toInt();
    return {kBack(*reinterpret_cast<const MeshAxis*>(axis), gradients[0]), at::Tensor()};
  }
};

// Row i of every rank belongs to expert 3 * i mod 8: some experts have no rows. Ranks of an ep
// group see each other's rows, and compute those of their own experts.
struct ScalingExpertsImpl : torch::nn::Module, ExpertModule {
  ScalingExpertsImpl()
      : weight(register_parameter("weight", at::rand({kExperts, kWidth}) + 0.5)),
        bias(register_parameter("bias", at::rand({kExperts}))) {}
  void join(const MeshAxis& axis) override { ep = &axis; }

  at::Tensor forward(const at::Tensor& rows) {
    const at::Tensor expert = (at::arange(kRows) * 3).remainder(kExperts);
    if (ep == nullptr) return scaled(rows, expert);
    const auto axis = reinterpret_cast<int64_t>(ep);
    const at::Tensor all = Exchange<gathered, scattered>::apply(rows, axis);
    const at::Tensor local = expert.repeat({ep->size()}) - ep->rank() * weight.size(0);
    const at::Tensor mine = local.ge(0).logical_and(local.lt(weight.size(0))).nonzero().view({-1});
    const at::Tensor computed = scaled(all.index_select(0, mine), local.index_select(0, mine));
    return Exchange<scattered, gathered>::apply(at::zeros_like(all).index_copy(0, mine, computed),
                                                axis);
  }

  at::Tensor scaled(const at::Tensor& rows, const at::Tensor& expert) const {
    return rows * weight.index_select(0, expert) + bias.index_select(0, expert).unsqueeze(1);
  }

  at::Tensor weight, bias;
  const MeshAxis* ep = nullptr;
};
TORCH_MODULE(ScalingExperts);

struct LayerImpl : torch::nn::Module {
  LayerImpl()
      : linear(register_module("linear", torch::nn::Linear(kWidth, kWidth))),
        experts(register_module("experts", ScalingExperts())) {}
  at::Tensor forward(const at::Tensor& x) {
    const at::Tensor hidden = at::tanh(linear(x));
    return hidden + experts(hidden);
  }
  torch::nn::Linear linear;
  ScalingExperts experts;
};
TORCH_MODULE(Layer);

struct MixtureImpl : torch::nn::Module {
  MixtureImpl()
      : first(register_module("first", Unit<Layer>())),
        second(register_module("second", Unit<Layer>())) {}
  at::Tensor forward(const at::Tensor& x) { return second(first(x)); }
  Unit<Layer> first, second;
};
TORCH_MODULE(Mixture);

Mixture mixture() {
  return build([] { return Mixture(); });
}

at::Tensor loss_of(Mixture& model, int rank, int step) {
  return model(input_for(rank, step, {kRows, kWidth})).square().mean();
}

// What a rank has of whole values: of experts its own slices.
std::vector<at::Tensor> owned_of(const std::vector<at::Tensor>& whole, const Mesh& mesh,
                                 Mixture& model) {
  std::vector<at::Tensor> owned;
  const std::vector<at::Tensor> parameters = model->parameters();
  for (size_t i = 0; i < whole.size(); ++i) {
    const int64_t rows = parameters[i].size(0);
    const bool is_cut = rows != whole[i].size(0);
    owned.push_back(is_cut ? whole[i].narrow(0, mesh.ep()->rank() * rows, rows) : whole[i]);
  }
  return owned;
}

struct Grids {
  int ranks;
  MeshOptions mesh;
};

std::vector<Grids> factorisations() {
  std::vector<Grids> all;
  for (const int ranks : {2, 4, 8})
    for (int outer = 1; outer <= ranks; outer *= 2)
      for (int ep = 1; ep <= ranks; ep *= 2) all.push_back({ranks, {.outer = outer, .ep = ep}});
  return all;
}

std::string text(const Grids& grids, const Strategy& strategy) {
  return concat(grids.ranks, " ranks, outer ", grids.mesh.outer, ", ep ", grids.mesh.ep, ", ",
                to_text(strategy));
}

TEST(ExpertGrid, CoversTheRanksThatHaveTheSameExperts) {
  run_ranks(8, [](World& world) {
    const Mesh mesh = world.mesh({.outer = 2, .ep = 2});
    const Grid experts = mesh.grid(GridKind::kExpert);
    const auto world_ranks = [&](const MeshAxis& axis) {
      at::Tensor ranks = at::empty({axis.size()}, at::kLong);
      axis.gather().all_gather(ranks, at::full({1}, world.rank(), at::kLong), "ranks").wait();
      return std::vector<int64_t>(ranks.const_data_ptr<int64_t>(),
                                  ranks.const_data_ptr<int64_t>() + axis.size());
    };
    const std::vector<int64_t> ep = world_ranks(*mesh.ep());
    const std::vector<int64_t> inner = world_ranks(*experts.inner);
    const std::vector<int64_t> outer = world_ranks(*experts.outer);
    if (world.rank() != 5) return;
    EXPECT_THAT(ep, ElementsAre(4, 5));
    EXPECT_THAT(inner, ElementsAre(5, 7));
    EXPECT_THAT(outer, ElementsAre(1, 5));
  });
  run_ranks(8, [](World& world) {  // an ep group of two rows
    const Mesh mesh = world.mesh({.outer = 4, .ep = 4});
    EXPECT_EQ(mesh.ep()->size(), 4);
    EXPECT_EQ(mesh.grid(GridKind::kExpert).inner->size(), 1);
    EXPECT_EQ(mesh.grid(GridKind::kExpert).outer->size(), 2);
  });
}

TEST(ExpertGrid, OfSizesThatDoNotFitShowsTheArithmetic) {
  run_ranks(4, [](World& world) {
    for (const MeshOptions& options : {MeshOptions{.ep = 3}, {.ep = 0}, {.ep = 8}})
      EXPECT_THAT(error_of([&] { world.mesh(options); }),
                  AllOf(HasSubstr(concat("ep is ", options.ep)),
                        HasSubstr("4 ranks = 1 outer x 4 inner: it must divide 4")));
    const Mesh mesh = world.mesh({.ep = 4});
    struct SixImpl : torch::nn::Module, ExpertModule {
      SixImpl() { register_parameter("weight", at::ones({6, 2})); }
      void join(const MeshAxis&) override {}
    };
    EXPECT_THAT(error_of([&] { fully_shard(std::make_shared<SixImpl>(), mesh); }),
                AllOf(HasSubstr("'weight' of shape [6, 2]"), HasSubstr("ep 4")));
  });
}

TEST(ExpertGrid, TrainsAsTheUnshardedModel) {
  for (const Grids& grids : factorisations()) {
    const auto expected = train_plain(mixture(), grids.ranks, 3, loss_of);
    for (const Strategy& strategy : named_strategies()) {
      run_ranks(grids.ranks, [&](World& world) {
        const Mesh mesh = world.mesh(grids.mesh);
        Mixture model = mixture();
        Sharded sharded = fully_shard(model, mesh, {.strategy = strategy});
        train(model, sharded, world.rank(), 3, loss_of);
        const auto weights = weights_of(sharded, model);
        expect_close(weights, owned_of(expected, mesh, model), text(grids, strategy));
      });
    }
  }
}

TEST(ExpertGrid, AddsUpMicrobatches) {
  const Grids grids{4, {.ep = 4}};  // gradients of experts meet no collective: nothing else scales
  Mixture plain = mixture();
  for (int rank = 0; rank < 4; ++rank)
    for (int step = 0; step < 2; ++step) (loss_of(plain, rank, step) / 4.0).backward();
  for (const Strategy& strategy : named_strategies())
    run_ranks(grids.ranks, [&](World& world) {
      const Mesh mesh = world.mesh(grids.mesh);
      Mixture model = mixture();
      Sharded sharded = fully_shard(model, mesh, {.strategy = strategy});
      for (int step = 0; step < 2; ++step) {
        sharded.microbatch({.last = step == 1});
        loss_of(model, world.rank(), step).backward();
      }
      sharded.wait_gradients();
      for (const ShardedParameter& each : sharded.parameters()) {
        if (each.name != "second.experts.weight") continue;
        const at::Tensor whole = plain->second->experts->weight.grad();
        const at::Tensor mine = whole.narrow(0, world.rank() * 2, 2).reshape({-1});
        EXPECT_TRUE(at::allclose(each.gradient, mine, 1e-5, 1e-7)) << text(grids, strategy);
      }
    });
}

// Every element counts once, whoever holds it and how often; clipping divides all alike.
TEST(ExpertGrid, MeasuresTheNormOfAllGradients) {
  for (const Grids& grids : factorisations()) {
    Mixture plain = mixture();
    for (int rank = 0; rank < grids.ranks; ++rank)
      (loss_of(plain, rank, 0) / static_cast<double>(grids.ranks)).backward();
    double squares = 0.0;
    for (const at::Tensor& parameter : plain->parameters())
      squares += parameter.grad().to(at::kDouble).square().sum().item<double>();
    for (const Strategy& strategy : named_strategies())
      run_ranks(grids.ranks, [&](World& world) {
        const Mesh mesh = world.mesh(grids.mesh);
        Mixture model = mixture();
        Sharded sharded = fully_shard(model, mesh, {.strategy = strategy});
        SGD optimizer(sharded, {.lr = 0.1, .step = {.max_norm = 0.01}});
        loss_of(model, world.rank(), 0).backward();
        optimizer.step();
        EXPECT_NEAR(optimizer.gradient_norm(), std::sqrt(squares), 1e-5 * std::sqrt(squares))
            << text(grids, strategy);
      });
  }
}

TEST(ExpertGrid, SkipsAStepWithANanOfOneRanksExpertsEverywhere) {
  run_ranks(4, [](World& world) {
    const Mesh mesh = world.mesh({.ep = 4});
    Mixture model = mixture();
    Sharded sharded = fully_shard(model, mesh);
    AdamW optimizer(sharded, {.lr = 0.1, .step = {.on_nonfinite = OnNonfinite::kSkip}});
    const auto before = weights_of(sharded, model);
    loss_of(model, world.rank(), 0).backward();
    sharded.wait_gradients();
    if (world.rank() == 2)
      for (const ShardedParameter& each : sharded.parameters())
        if (each.name == "first.experts.bias") each.gradient.fill_(std::nan(""));
    optimizer.step();
    EXPECT_EQ(optimizer.state().skipped, 1);
    expect_equal(weights_of(sharded, model), before);
  });
}

// Weights and moments, from every grid into every other one.
TEST(ExpertGrid, IsNotSeenInCheckpoints) {
  const std::vector<Grids> all = {{1, {}},
                                  {2, {.ep = 2}},
                                  {4, {.ep = 4}},
                                  {4, {.outer = 2, .ep = 2}},
                                  {4, {.outer = 4, .ep = 2}}};
  const auto trained = [](const Grids& grids, int first, int last, const auto& then) {
    run_ranks(grids.ranks, [&](World& world) {
      const Mesh mesh = world.mesh(grids.mesh);
      Mixture model = mixture();
      Sharded sharded = fully_shard(model, mesh);
      AdamW optimizer(sharded, {.lr = 0.05});
      const CheckpointState state{.sharded = sharded, .optimizer = &optimizer};
      then(model, mesh, state, [&] {
        for (int step = first; step < last; ++step) {
          loss_of(model, 0, step).backward();  // the same on every rank: the mean has no order
          optimizer.step();
          optimizer.zero_grad();
        }
      });
    });
  };
  std::vector<at::Tensor> expected;
  trained({1, {}}, 0, 5,
          [&](Mixture& model, const Mesh&, const CheckpointState& state, auto train) {
            train();
            expected = weights_of(state.sharded, model);
          });
  for (const Grids& from : all) {
    const TempDir directory;
    trained(from, 0, 3, [&](Mixture&, const Mesh&, const CheckpointState& state, auto train) {
      train();
      save_checkpoint(directory.path(), state, {.step = 3});
    });
    for (const Grids& to : all)
      trained(to, 3, 5,
              [&](Mixture& model, const Mesh& mesh, const CheckpointState& state, auto train) {
                load_checkpoint(directory.path(), state);
                train();
                expect_close(weights_of(state.sharded, model), owned_of(expected, mesh, model),
                             concat(text(from, {}), " to ", text(to, {})));
              });
  }
}

}  // namespace
}  // namespace fsdp::testing::expert_grid_test
