// Sharded training over processes: like plain training, and the same bits as over threads. Started
// by ctest with 2 and 3 processes.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "fsdp/comm/world.h"
#include "support/parity.h"
#include "support/process_world.h"

namespace fsdp {
namespace {

using testing::expect_equal_bits;
using testing::expect_parity;
using testing::ModelKind;
using testing::ParityCase;
using testing::Precision;
using testing::RankOutcome;
using testing::train_rank;
using testing::train_threads;
using testing::UpdatedBy;

World checked_world() {
  CommOptions options = CommOptions::from_environment();
  options.checked = true;
  return testing::join_processes(options);
}

class ProcessParity : public ::testing::TestWithParam<ParityCase> {};

TEST_P(ProcessParity, TrainsLikeAPlainModelAndLikeThreads) {
  World world = checked_world();
  ParityCase parity = GetParam();
  // One outer or inner axis over all processes: two and three are prime.
  (parity.outer > 1 ? parity.outer : parity.inner) = world.size();
  const RankOutcome outcome = train_rank(world, parity);
  expect_parity(outcome, parity, world.rank());
  const std::vector<RankOutcome> by_threads = train_threads(parity);
  expect_equal_bits(outcome, by_threads[static_cast<size_t>(world.rank())]);
}

std::vector<ParityCase> cases() {
  std::vector<ParityCase> all;
  for (const char* strategy : {"no_shard", "optim", "optim_grads", "optim_grads_params"})
    all.push_back({.model = ModelKind::kHybrid, .strategy = strategy, .microbatches = 3});
  for (const char* strategy : {"optim_grads_params", "optim_grads_params+hfsdp", "SS/SS/SS"})
    all.push_back({.model = ModelKind::kLlama,
                   .strategy = strategy,
                   .outer = 2,
                   .pool = PoolKind::kPlanned,
                   .precision = Precision::kBf16Wire,
                   .lifetime = GradientLifetime::kStep,
                   .gradient = GradientOf::kSumOverRanks});
  all.push_back({.model = ModelKind::kMlp, .precision = Precision::kBf16});
  for (const char* strategy : {"optim", "optim_grads_params"})
    for (const UpdatedBy updated_by : {UpdatedBy::kOurs, UpdatedBy::kOursOffloaded})
      all.push_back({.model = ModelKind::kHybrid,
                     .strategy = strategy,
                     .precision = Precision::kBf16,
                     .updated_by = updated_by});
  return all;
}

INSTANTIATE_TEST_SUITE_P(Cases, ProcessParity, ::testing::ValuesIn(cases()), [](const auto& test) {
  return std::to_string(test.index) + "_" + test.param.name();
});

}  // namespace
}  // namespace fsdp

// The job is joined once for all cases: MPI cannot be started twice in a process.
int main(int argc, char** argv) {
  ::testing::InitGoogleTest(&argc, argv);
  const fsdp::World keeps_the_job_alive =
      fsdp::testing::join_processes(fsdp::CommOptions::from_environment());
  return RUN_ALL_TESTS();
}
