// How evenly Muon's products are spread over the ranks of known models, against a lower bound.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <optional>
#include <queue>
#include <vector>

#include "fsdp/base/error.h"
#include "fsdp/base/text.h"
#include "fsdp/layout/flat_layout.h"
#include "fsdp/plan/forecast.h"
#include "fsdp/plan/group_plan.h"
#include "fsdp/plan/load_model.h"

namespace fsdp::matrix_owners_test {
namespace {

// No division of whole tasks among so many owners has a lower maximum: the mean, the largest task,
// and where tasks outnumber owners the two smallest of the largest owners + 1.
double best_possible(std::vector<double> tasks, int64_t num_owners) {
  double total = 0;
  for (const double task : tasks) total += task;
  std::sort(tasks.rbegin(), tasks.rend());
  double bound = std::max(total / static_cast<double>(num_owners), tasks.front());
  const auto next = static_cast<size_t>(num_owners);
  if (tasks.size() > next) bound = std::max(bound, tasks[next - 1] + tasks[next]);
  return bound;
}

std::vector<double> tasks_of(const Planner& planner) {
  std::vector<double> tasks;
  for (const GroupPlan& group : planner.groups())
    if (!group.layout.request().matrix_rows.empty())
      for (int64_t tensor = 0; tensor < group.layout.num_tensors(); ++tensor)
        for (const OwnedMatrix& matrix : group.layout.matrices_of(tensor))
          tasks.push_back(static_cast<double>(newton_schulz_flops(matrix.rows, matrix.columns)));
  return tasks;
}

// The most that an owner gets when all tasks, largest first, go to whoever has least. That is at
// most 4/3 of the best possible (Graham 1969), even where the bound above is too low to show it: of
// llama-1b on 80 ranks, where 66 matrices cost much and 44 nearly half of it, nobody can come
// nearer to it than 1.351.
double longest_first(std::vector<double> tasks, int64_t num_owners) {
  std::sort(tasks.rbegin(), tasks.rend());
  std::priority_queue<double, std::vector<double>, std::greater<>> loads;
  for (int64_t i = 0; i < num_owners; ++i) loads.push(0);
  double most = 0;
  for (const double task : tasks) {
    const double load = loads.top() + task;
    loads.pop();
    loads.push(load);
    most = std::max(most, load);
  }
  return most;
}

TEST(MatrixOwners, AreWithinFourThirdsOfTheBestPossible) {
  for (const char* model : {"llama-1b", "llama3-8b", "mixtral-8x7b"})
    for (const int64_t ranks : {8, 9, 13, 24, 31, 64, 80, 97, 128, 131, 256, 257, 384, 500, 512}) {
      const Planner planner(load_model(model), {.ranks = ranks, .muon = DType::kBFloat16});
      const MatrixForecast matrices = planner.forecast().matrices;
      const std::vector<double> tasks = tasks_of(planner);
      EXPECT_EQ(matrices.num_matrices, static_cast<int64_t>(tasks.size()));
      const double bound = best_possible(tasks, ranks);
      const double reached = longest_first(tasks, ranks);
      EXPECT_LE(matrices.most_flops, std::max(bound * 4 / 3, reached)) << model << " on " << ranks;
      EXPECT_GE(matrices.most_flops, bound * 0.999999) << model << " on " << ranks;
      if (ranks % 2 != 0) continue;
      // Over two axes every copy of an inner shard is updated alike.
      const Planner two(load_model(model), {.ranks = ranks, .outer = 2, .muon = DType::kBFloat16});
      EXPECT_LE(two.forecast().matrices.most_flops,
                std::max(best_possible(tasks, ranks / 2) * 4 / 3, longest_first(tasks, ranks / 2)))
          << model << " on " << ranks;
    }
}

TEST(MatrixOwners, ShareOutTheMatricesOfExperts) {
  PlanOptions options{.ranks = 8, .ep = 4, .muon = DType::kBFloat16};
  const Planner planner(load_model("mixtral-8x7b"), options);
  const MatrixForecast matrices = planner.forecast().matrices;
  EXPECT_EQ(matrices.num_matrices, 32 * (4 + 8 * 3));
  EXPECT_LE(matrices.most_flops, 1.34 * matrices.mean_flops);
  EXPECT_EQ(matrices.num_idle_ranks, 0);
}

TEST(MatrixOwners, KeepOneMomentOfMatrices) {
  const auto moments = [](std::optional<DType> muon) {
    return Planner(load_model("llama-1b"), {.ranks = 1, .muon = muon}).forecast().bytes;
  };
  const MemoryBytes adamw = moments(std::nullopt);
  const MemoryBytes muon = moments(DType::kBFloat16);
  const int64_t hidden = 22 * (2 * 2048 * 2048 + 2 * 256 * 2048 + 3 * 2048 * 5632);
  EXPECT_EQ(adamw.moments - muon.moments, 4 * hidden);
  EXPECT_EQ(muon.workspace, 2 * (2 * 2048 * 5632 + 2 * 2048 * 2048));
  EXPECT_EQ(adamw.workspace, 0);
}

TEST(MatrixOwners, RefuseWhatCutsMatrices) {
  const ModelShape model = load_model("llama-1b");
  EXPECT_THROW(Planner(model, {.ranks = 8, .offload = 0.5, .muon = DType::kBFloat16}), UsageError);
  EXPECT_THROW(Planner(model, {.ranks = 8, .tp = 2, .muon = DType::kBFloat16}), UsageError);
}

}  // namespace
}  // namespace fsdp::matrix_owners_test
