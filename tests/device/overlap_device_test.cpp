// A step's kernels by stream and time: communication and updates have streams of their own and run
// while the model computes, and the host waits for nothing.
#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdio>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "fsdp/base/text.h"
#include "fsdp/comm/backends.h"
#include "support/device_trace.h"
#include "support/llama_training.h"
#include "support/require.h"
#include "support/run_ranks.h"

namespace fsdp::overlap_device_test {
namespace {

using testing::DeviceSpan;
using testing::DeviceTrace;
using testing::LlamaTraining;

enum class Ranks {
  kTwoThreads,  // that share the GPU
  kOneOverNccl,
};

constexpr int kSteps = 3;
// At least that part of gathers and reductions runs while the model computes. What cannot: each
// step's first gathers, which wait for their updates, and its last reduction.
constexpr double kHidden = 0.5;

struct Traced {
  DeviceTrace trace = {};
  int ranks = 0;
  std::set<int64_t> compute = {};
  std::set<int64_t> gather = {};
  std::set<int64_t> reduce = {};
  std::set<int64_t> update = {};

  std::set<int64_t> communication() const {
    std::set<int64_t> both = gather;
    both.insert(reduce.begin(), reduce.end());
    return both;
  }
};

Traced with_streams(DeviceTrace trace, int ranks) {
  Traced traced{.trace = std::move(trace), .ranks = ranks};
  traced.compute = traced.trace.streams_of(testing::is_computing);
  traced.update =
      traced.trace.streams_of([](const DeviceSpan& span) { return span.is_named("adamw_kernel"); });
  traced.reduce =
      traced.trace.streams_of([](const DeviceSpan& span) { return span.is_named("sum_kernel"); });
  traced.gather = traced.trace.streams_of([&](const DeviceSpan& span) {
    return (testing::is_device_copy(span) || span.is_named("nccl")) &&
           !traced.compute.contains(span.stream) && !traced.update.contains(span.stream) &&
           !traced.reduce.contains(span.stream);
  });
  return traced;
}

DeviceTrace trace_of(World& world, const ShardOptions& options) {
  LlamaTraining training(world, options, {.rows = world.size() == 1 ? 16 : 8, .sequence = 4096});
  training.steps(kSteps);
  return testing::trace_device(world, [&] { training.steps(kSteps); });
}

DeviceTrace trace_of(Ranks ranks) {
  DeviceTrace trace;
  if (ranks == Ranks::kTwoThreads) {
    testing::run_ranks(2, [&](World& world) {
      DeviceTrace mine = trace_of(world, {});
      if (world.rank() == 0) trace = std::move(mine);
    });
  } else {
    CommOptions options = CommOptions::from_environment();
    options.nccl = NcclUse::kAlways;
    World world = World::from_environment(options);
    trace = trace_of(world, {.collectives = Collectives::kAlways});
  }
  return trace;
}

class StepTrace : public ::testing::TestWithParam<Ranks> {
 protected:
  void SetUp() override {
    FSDP_REQUIRE_GPU();
    if (GetParam() == Ranks::kOneOverNccl && !nccl_available())
      GTEST_SKIP() << "built without NCCL";
  }

  void TearDown() override {
    if (HasFailure()) std::printf("%s", traced().trace.text().c_str());
  }

  // One trace for all tests.
  static const Traced& traced() {
    static std::map<Ranks, Traced> known;
    const auto found = known.find(GetParam());
    if (found != known.end()) return found->second;
    const int ranks = GetParam() == Ranks::kTwoThreads ? 2 : 1;
    const Traced& made = known[GetParam()] = with_streams(trace_of(GetParam()), ranks);
    return made;
  }
};

TEST_P(StepTrace, GathersReductionsAndUpdatesHaveStreamsOfTheirOwn) {
  const Traced& step = traced();
  const auto num_ranks = static_cast<size_t>(step.ranks);
  EXPECT_EQ(step.compute.size(), num_ranks);
  EXPECT_EQ(step.gather.size(), num_ranks);
  EXPECT_EQ(step.reduce.size(), num_ranks);
  EXPECT_EQ(step.update.size(), num_ranks);
  std::set<int64_t> all;
  for (const auto* streams : {&step.compute, &step.gather, &step.reduce, &step.update})
    all.insert(streams->begin(), streams->end());
  EXPECT_EQ(all.size(), 4 * num_ranks) << "two kinds of work share a stream";
  EXPECT_EQ(step.trace.streams(), all) << "something runs elsewhere";
}

TEST_P(StepTrace, CommunicationIsHiddenBehindComputing) {
  const Traced& step = traced();
  std::printf("computing: %.0f us\n", step.trace.busy_us(step.compute));
  const auto is_hidden = [&](const std::set<int64_t>& streams, const DeviceTrace::Filter& is_it,
                             const char* what) {
    const int64_t all = step.trace.count(is_it);
    const int64_t beside = step.trace.count_beside(is_it, step.compute);
    std::printf("%s: %.0f us, %.0f of them while the model computes; %lld of %lld\n", what,
                step.trace.busy_us(streams), step.trace.busy_together_us(streams, step.compute),
                static_cast<long long>(beside), static_cast<long long>(all));
    return static_cast<double>(beside) > kHidden * static_cast<double>(all);
  };
  EXPECT_TRUE(is_hidden(
      step.gather, [&](const DeviceSpan& span) { return step.gather.contains(span.stream); },
      "gathers"));
  EXPECT_TRUE(is_hidden(
      step.reduce, [](const DeviceSpan& span) { return span.is_named("sum_kernel"); },
      "reductions"));
  is_hidden(
      step.update, [](const DeviceSpan& span) { return span.is_named("adamw_kernel"); }, "updates");
}

// One rank alone: the kernels of others cannot be told from its own.
class OneRankTrace : public StepTrace {};

// The next forward waits for the update of the unit it needs, and for no other.
TEST_P(OneRankTrace, TheNextForwardBeginsBeforeTheLastUpdateEnds) {
  const Traced& step = traced();
  std::vector<double> begins;
  double last_update = 0;
  for (const DeviceSpan& span : step.trace.spans())
    if (span.is_named("begin_step_kernel")) begins.push_back(span.begin_us);
  ASSERT_EQ(begins.size(), static_cast<size_t>(kSteps));
  std::sort(begins.begin(), begins.end());
  for (size_t i = 0; i + 1 < begins.size(); ++i) {
    for (const DeviceSpan& span : step.trace.spans())
      if (span.is_named("adamw_kernel") && span.begin_us < begins[i + 1])
        last_update = std::max(last_update, span.end_us);
    const int64_t begun = step.trace.count([&](const DeviceSpan& span) {
      return step.compute.contains(span.stream) && span.begin_us > begins[i] &&
             span.begin_us < last_update;
    });
    std::printf("updates take %.0f us; kernels of the next forward that begin meanwhile: %lld\n",
                last_update - begins[i], static_cast<long long>(begun));
    EXPECT_GT(begun, 0) << "step " << i;
  }
}

TEST_P(StepTrace, TheHostNeverWaitsAndAsksForNoMemory) {
  const Traced& step = traced();
  std::vector<std::string> calls;
  for (const testing::HostCall& call : step.trace.waits())
    calls.push_back(concat(call.name, " in ", call.thread));
  for (const testing::HostCall& call : step.trace.allocations())
    calls.push_back(concat(call.name, " in ", call.thread));
  EXPECT_THAT(calls, ::testing::IsEmpty());
  EXPECT_EQ(step.trace.count([](const DeviceSpan& span) {
    return span.is_named("HtoD") || span.is_named("DtoH");
  }),
            0)
      << "something travels to or from the host";
}

std::string name_of_ranks(const ::testing::TestParamInfo<Ranks>& test) {
  return test.param == Ranks::kTwoThreads ? "TwoThreads" : "OneOverNccl";
}

INSTANTIATE_TEST_SUITE_P(Worlds, StepTrace,
                         ::testing::Values(Ranks::kTwoThreads, Ranks::kOneOverNccl), name_of_ranks);
INSTANTIATE_TEST_SUITE_P(Worlds, OneRankTrace, ::testing::Values(Ranks::kOneOverNccl),
                         name_of_ranks);

}  // namespace
}  // namespace fsdp::overlap_device_test
