// NCCL ranks that the tests of a program share, and the small training that they compare.
#pragma once

#include <gtest/gtest.h>
#include <unistd.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "fsdp/graph/graph.h"
#include "support/nccl_ranks.h"

namespace fsdp::testing {

// The file to which NCCL of this process logs its use of registered memory.
inline std::string nccl_log_path() {
  return ::testing::TempDir() + "nccl." + std::to_string(getpid());
}

// Processes on one GPU take turns of some milliseconds, and every communicator needs many to meet.
// So the tests share ranks, except those that fail.
class SharedRanks : public ::testing::Environment {
 public:
  World& world() {
    if (!world_) world_.emplace(world_over_nccl(CommOptions::from_environment()));
    return *world_;
  }
  const Mesh& mesh() {
    if (!mesh_) mesh_.emplace(world().mesh());
    return *mesh_;
  }
  // All ranks along the outer axis; the inner one has collectives of one rank.
  const Mesh& outer_mesh() {
    if (!outer_mesh_) outer_mesh_.emplace(world().mesh({.outer = world().size()}));
    return *outer_mesh_;
  }
  void TearDown() override {
    outer_mesh_.reset();
    mesh_.reset();
    world_.reset();
  }

 private:
  std::optional<World> world_;
  std::optional<Mesh> mesh_;
  std::optional<Mesh> outer_mesh_;
};

inline SharedRanks* const shared_ranks = new SharedRanks;  // belongs to GoogleTest

// A few steps of a small model; the loss of each, some validations, and the weights at the end.
struct SmallResult {
  std::vector<double> losses;
  std::vector<double> validations;
  std::vector<at::Tensor> weights;
};

enum class By { kStep, kGraph };

inline std::vector<at::Tensor> whole_weights(SmallTraining& training) {
  const auto whole = training.sharded().full_parameters();
  std::vector<at::Tensor> weights;
  for (const at::Tensor& parameter : training.model().parameters())
    weights.push_back(parameter.cpu());
  return weights;
}

inline SmallResult train_small(const Mesh& mesh, const SmallOptions& options, By by) {
  SmallTraining training(mesh, options);
  std::unique_ptr<Graph> graph;
  if (by == By::kGraph)
    graph = std::make_unique<Graph>(training.sharded(), &training.optimizer(),
                                    [&] { training.step(); });
  SmallResult result;
  for (int number = 0; number < 12; ++number) {
    training.begin_step(number);
    graph ? graph->run() : training.step();
    result.losses.push_back(training.loss());
    // Before a step is recorded, and between replays: weights are fresh after it, and then are not.
    if (number % 4 == 2) result.validations.push_back(training.validate());
  }
  result.weights = whole_weights(training);
  return result;
}

inline void expect_same(const SmallResult& actual, const SmallResult& expected) {
  EXPECT_EQ(actual.losses, expected.losses);
  EXPECT_EQ(actual.validations, expected.validations);
  ASSERT_EQ(actual.weights.size(), expected.weights.size());
  for (size_t i = 0; i < expected.weights.size(); ++i)
    EXPECT_TRUE(at::equal(actual.weights[i], expected.weights[i])) << "parameter " << i;
}

}  // namespace fsdp::testing
