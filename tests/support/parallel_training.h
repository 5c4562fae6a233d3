// Trainings of the parallel model on any factorisation of the ranks, and the same unsharded.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "fsdp/base/text.h"
#include "fsdp/optim/adamw.h"
#include "support/parallel_model.h"
#include "support/sharded_training.h"

namespace fsdp::testing::parallel {

struct Grids {
  int ranks;
  MeshOptions mesh;
  int data_parallel_size() const { return ranks / mesh.tp; }
};

inline std::string text(const Grids& grids) {
  return concat(grids.ranks, " ranks, outer ", grids.mesh.outer, ", ep ", grids.mesh.ep, ", tp ",
                grids.mesh.tp);
}

// All of them into (outer, inner, ep, tp): every axis has a power of two.
inline std::vector<Grids> factorisations(int ranks) {
  std::vector<Grids> all;
  for (int outer = 1; outer <= ranks; outer *= 2)
    for (int tp = 1; outer * tp <= ranks; tp *= 2)
      for (int ep = 1; ep <= ranks; ep *= 2) all.push_back({ranks, {outer, ep, tp}});
  return all;
}

inline ParallelModel parallel_model(uint64_t seed = 7) {
  return build([] { return ParallelModel(); }, seed);
}

// Its batch is that of a loss, not of a rank.
inline at::Tensor loss_of(ParallelModel& model, int loss, int step) {
  return model(input_for(loss, step, {kTokens, kHidden})).square().mean();
}

using Named = std::map<std::string, at::Tensor>;

struct Expected {
  std::vector<std::vector<double>> losses;  // by step and loss
  Named gradients;                          // of step 0, averaged over the losses
  std::vector<double> norms;                // by step
  Named weights;                            // after the last step
};

inline constexpr int kParallelSteps = 3;
inline const AdamWOptions kParallelAdamW{
    .lr = 0.02, .eps = 1e-5, .step = {.max_norm = 0.05, .measures_norm = true}};

// One rank without any of the axes; the gradients are autograd's own.
inline Expected train_whole(int data_parallel_size) {
  Expected expected;
  ParallelModel plain = parallel_model();
  for (int loss = 0; loss < data_parallel_size; ++loss)
    (loss_of(plain, loss, 0) / static_cast<double>(data_parallel_size)).backward();
  double squares = 0.0;
  for (const auto& item : plain->named_parameters()) {
    expected.gradients[item.key()] = item.value().grad();
    squares += item.value().grad().to(at::kDouble).square().sum().item<double>();
  }
  run_ranks(1, [&](World& world) {
    const Mesh mesh = world.mesh();
    ParallelModel model = parallel_model();
    const Sharded sharded = fully_shard(model, mesh);
    AdamW optimizer(sharded, kParallelAdamW);
    for (int step = 0; step < kParallelSteps; ++step) {
      std::vector<double>& losses = expected.losses.emplace_back();
      for (int loss = 0; loss < data_parallel_size; ++loss) {
        sharded.microbatch({.last = loss + 1 == data_parallel_size});
        const at::Tensor value = loss_of(model, loss, step);
        (value / static_cast<double>(data_parallel_size)).backward();
        losses.push_back(value.item<double>());
      }
      optimizer.step();
      expected.norms.push_back(optimizer.gradient_norm());
      optimizer.zero_grad();
    }
    const auto whole = sharded.full_parameters();
    for (const auto& item : model->named_parameters())
      expected.weights[item.key()] = item.value().detach().clone();
  });
  EXPECT_NEAR(expected.norms.front(), std::sqrt(squares), 1e-5 * std::sqrt(squares));
  return expected;
}

inline void expect_owned_weights(const Sharded& sharded, const Mesh& mesh, ParallelModel& model,
                                 const Named& weights, const std::string& what) {
  const auto whole = sharded.full_parameters();
  for (const auto& item : model->named_parameters())
    EXPECT_TRUE(
        at::allclose(item.value(), owned_by(mesh, item.key(), weights.at(item.key())), 1e-4, 2e-5))
        << what << " " << item.key() << "\n"
        << item.value() << "\n"
        << owned_by(mesh, item.key(), weights.at(item.key()));
}

// `factor`: what the gradients are of those given.
inline void expect_gradients(const Sharded& sharded, const Mesh& mesh, const Named& gradients,
                             double factor, const std::string& what) {
  sharded.wait_gradients();
  for (const ShardedParameter& each : sharded.parameters()) {
    const at::Tensor owned = owned_by(mesh, each.name, gradients.at(each.name));
    ASSERT_EQ(owned.sizes(), at::IntArrayRef(each.shape)) << what << " " << each.name;
    const at::Tensor mine =
        owned.reshape({-1}).narrow(0, each.begin, each.gradient.numel()) * factor;
    EXPECT_TRUE(at::allclose(each.gradient, mine, 1e-4, 1e-7)) << what << " " << each.name << "\n"
                                                               << each.gradient << "\n"
                                                               << mine;
  }
}

}  // namespace fsdp::testing::parallel
