// Ranks never wait for each other in a circle, whatever the axes: seen from each rank in turn, in a
// world that records instead of communicating.
#include <algorithm>
#include <array>
#include <map>
#include <random>
#include <set>
#include <string>
#include <tuple>
#include <vector>

#include <gtest/gtest-spi.h>

#include "fsdp/optim/adamw.h"
#include "support/parallel_training.h"

namespace fsdp::testing::collective_order_test {
namespace {

using namespace parallel;

// One collective of the job, which each of its ranks calls once.
using Collective = std::tuple<std::string, int, uint64_t>;  // communicator, first member, number

std::string text_of(const Collective& collective) {
  return concat(std::get<0>(collective), " of rank ", std::get<1>(collective), ", operation ",
                std::get<2>(collective));
}

struct Case {
  Grids grids;
  Strategy strategy;
  int32_t prefetch;
  int microbatches;

  std::string text() const {
    return concat(parallel::text(grids), ", ", to_text(strategy), ", prefetch ", prefetch, ", ",
                  microbatches, " microbatches");
  }
};

// The calls of a rank in two steps, the second one in the order that the first one has shown.
Recording calls_of(const Case& one, int rank) {
  const auto recording = std::make_shared<Recording>();
  World world = World::simulated(rank, one.grids.ranks, recording);
  const Mesh mesh = world.mesh(one.grids.mesh);
  ParallelModel model = parallel_model();
  const Sharded sharded =
      fully_shard(model, mesh, {.strategy = one.strategy, .prefetch = one.prefetch});
  AdamW optimizer(sharded, {.step = {.max_norm = 1.0, .on_nonfinite = OnNonfinite::kSkip}});
  for (int step = 0; step < 2; ++step) {
    for (int i = 0; i < one.microbatches; ++i) {
      sharded.microbatch({.last = i + 1 == one.microbatches});
      loss_of(model, 0, step).backward();
    }
    optimizer.step();
    optimizer.zero_grad();
  }
  optimizer.wait();
  sharded.refresh_weights();
  return *recording;
}

// Whether there is one order of all collectives in which every rank calls its own. Then nobody
// waits in a circle, even if each rank had a single stream: the first of that order that has not
// ended has been called by all of its ranks, or is the next call of those that are missing.
void expect_one_order(const std::vector<Recording>& ranks) {
  std::map<Collective, std::set<Collective>> later;
  std::map<Collective, int> num_before;
  std::map<Collective, std::vector<const RecordedCall*>> callers;
  for (const Recording& calls : ranks) {
    const Collective* before = nullptr;
    for (const RecordedCall& call : calls) {
      const auto key = Collective{call.communicator, call.first, call.print.sequence};
      const auto at = callers.try_emplace(key).first;
      at->second.push_back(&call);
      num_before.try_emplace(key, 0);
      if (before != nullptr && later[*before].insert(key).second) ++num_before[key];
      before = &at->first;
    }
  }
  for (const auto& [key, calls] : callers) {
    EXPECT_EQ(calls.size(), static_cast<size_t>(calls.front()->ranks)) << text_of(key);
    for (const RecordedCall* call : calls)
      EXPECT_EQ(call->print, calls.front()->print) << text_of(key);
  }
  std::vector<Collective> free;
  for (const auto& [key, count] : num_before)
    if (count == 0) free.push_back(key);
  size_t num_ordered = 0;
  while (!free.empty()) {
    const Collective next = free.back();
    free.pop_back();
    ++num_ordered;
    for (const Collective& key : later[next])
      if (--num_before[key] == 0) free.push_back(key);
  }
  EXPECT_EQ(num_ordered, num_before.size()) << "some collectives wait for each other";
}

TEST(CollectiveOrder, IsOneForAllRanksOfAnyGrid) {
  std::mt19937_64 random(43);
  const auto one_of = [&random](const auto& choices) {
    return choices[std::uniform_int_distribution<size_t>(0, std::size(choices) - 1)(random)];
  };
  const std::vector<Grids> all = factorisations(16);
  constexpr std::array<int32_t, 3> kPrefetches = {0, 1, 3};
  constexpr std::array kMicrobatches = {1, 2};
  std::set<std::string> kinds;
  for (int trial = 0; trial < 24; ++trial) {
    Case one{one_of(all), one_of(named_strategies()), one_of(kPrefetches), one_of(kMicrobatches)};
    const MeshOptions& mesh = one.grids.mesh;
    const bool is_possible = mesh.ep <= kNumExperts && mesh.tp <= kWide / 2 &&
                             (mesh.outer > 1 || one.strategy.optimizer.outer != Placement::kShard);
    if (!is_possible) continue;
    SCOPED_TRACE(one.text());
    std::vector<Recording> ranks;
    for (int rank = 0; rank < one.grids.ranks; ++rank) ranks.push_back(calls_of(one, rank));
    for (const RecordedCall& call : ranks.front()) kinds.insert(call.communicator);
    expect_one_order(ranks);
    if (HasFailure()) return;
  }
  EXPECT_GE(kinds.size(), 12) << "axes and their communicators";
}

// The test finds what it looks for: two ranks that begin with different axes.
TEST(CollectiveOrder, OfACircleIsNone) {
  const auto call = [](const char* name) {
    RecordedCall one;
    one.communicator = name;
    one.ranks = 2;
    return one;
  };
  const std::vector<Recording> circle = {{call("inner"), call("outer")},
                                         {call("outer"), call("inner")}};
  EXPECT_NONFATAL_FAILURE(expect_one_order(circle), "wait for each other");
}

}  // namespace
}  // namespace fsdp::testing::collective_order_test
