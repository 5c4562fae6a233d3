// The `threads` backend against the suite that every backend must pass, and its own cases:
// disagreement, deadlines and failing ranks inside one process.
#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include "fsdp/comm/comm_error.h"
#include "fsdp/comm/communicator.h"
#include "fsdp/comm/world.h"
#include "support/communicator_suite.h"
#include "support/reduction_cases.h"

namespace fsdp::communicator_test {
namespace {

using ::testing::AllOf;
using ::testing::AnyOf;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

const CommOptions kShortDeadline = {.timeout_seconds = 30};

class ThreadsCommunicatorSuite : public ::testing::TestWithParam<std::tuple<size_t, int>> {};

TEST_P(ThreadsCommunicatorSuite, Passes) {
  const auto [index, ranks] = GetParam();
  const testing::CommunicatorCase& claim = testing::communicator_cases()[index];
  run_threads(ranks, kShortDeadline, [&](World& world) { claim.body(world, at::kCPU); });
}

INSTANTIATE_TEST_SUITE_P(AllCases, ThreadsCommunicatorSuite,
                         ::testing::Combine(::testing::Range(size_t{0},
                                                             testing::communicator_cases().size()),
                                            ::testing::Values(1, 3, 4)),
                         [](const auto& test) {
                           return testing::communicator_cases()[std::get<0>(test.param)].name +
                                  "On" + std::to_string(std::get<1>(test.param)) + "Ranks";
                         });

// Ranks of several hosts add so, here with various numbers of groups and of ranks in them.
TEST(ThreadsCommunicator, ReducesInGroups) {
  for (const auto& [ranks, group] : {std::pair(4, 2), std::pair(6, 2), std::pair(6, 3)})
    for (const testing::CommunicatorCase& claim : testing::reduction_cases())
      run_threads(ranks, {.timeout_seconds = 30, .sum_group = group}, [&](World& world) {
        EXPECT_EQ(world.communicator().sum_group(), group);
        claim.body(world, at::kCPU);
      });
}

// A host has 4 of 12 ranks. A communicator of other ranks adds those of one host first, as
// far as all its groups can be as large.
TEST(ThreadsCommunicator, KeepsGroupsWithinAHostWhenItIsSplit) {
  run_threads(12, {.timeout_seconds = 30, .sum_group = 4}, [](World& world) {
    const auto group_of = [&](const std::function<int(int)>& color_of) {
      std::vector<int> colors;
      for (int rank = 0; rank < world.size(); ++rank) colors.push_back(color_of(rank));
      return world.communicator().split(colors, "part")->sum_group();
    };
    EXPECT_EQ(group_of([](int rank) { return rank / 4; }), 4);  // each within a host
    EXPECT_EQ(group_of([](int rank) { return rank / 6; }), 2);  // one and a half hosts
    EXPECT_EQ(group_of([](int rank) { return rank % 4; }), 1);  // one of each host
    EXPECT_EQ(group_of([](int rank) { return rank % 2; }), 2);
    EXPECT_EQ(group_of([](int rank) { return rank / 2 % 2; }), 2);
    EXPECT_EQ(group_of([](int rank) { return rank == 0 ? 0 : 1; }), 1);
  });
}

TEST(ThreadsCommunicator, RefusesGroupsThatDoNotDivideTheRanks) {
  EXPECT_THAT([] { run_threads(6, {.sum_group = 4}, [](World&) {}); },
              ThrowsMessage<Error>(HasSubstr("is 4: it must divide the 6 ranks")));
}

// The error of each rank's own thread, in rank order.
std::vector<std::string> messages_of(int ranks, const CommOptions& options,
                                     const std::function<void(World&)>& body) {
  std::vector<std::string> messages(static_cast<size_t>(ranks));
  EXPECT_THROW(run_threads(ranks, options,
                           [&](World& world) {
                             try {
                               body(world);
                             } catch (const std::exception& error) {
                               messages[static_cast<size_t>(world.rank())] = error.what();
                               throw;
                             }
                           }),
               Error);
  return messages;
}

struct Disagreement {
  const char* name;
  std::function<Work(Communicator&)> most;
  std::function<Work(Communicator&)> odd_one;  // the last rank's other call
  const char* words_of_most;
  const char* words_of_odd_one;
};

TEST(ThreadsCommunicator, ShowsBothSidesOfADisagreementOnAllRanks) {
  const auto reduce = [](int64_t numel, at::ScalarType dtype, const char* tag, double scale = 1.0) {
    return [=](Communicator& comm) {
      return comm.all_reduce(at::ones({numel}, dtype), {.scale = scale}, tag);
    };
  };
  const auto scatter = [](Store store) {
    return [=](Communicator& comm) {
      return comm.reduce_scatter(at::ones({8}), at::ones({8 * comm.size()}), {.store = store}, "a");
    };
  };
  const auto gather = [](const char* tag) {
    return [=](Communicator& comm) {
      return comm.all_gather(at::ones({8 * comm.size()}), at::ones({8}), tag);
    };
  };
  const std::vector<Disagreement> table = {
      {"operation", gather("a"), reduce(24, at::kFloat, "a"), "all_gather 'a'", "all_reduce"},
      {"dtype", reduce(8, at::kFloat, "a"), reduce(8, at::kHalf, "a"), "Float", "Half"},
      {"bytes", reduce(8, at::kFloat, "a"), reduce(9, at::kFloat, "a"), "32 bytes", "36 bytes"},
      {"tag", gather("a"), gather("b"), "'a'", "'b'"},
      {"scale", reduce(8, at::kFloat, "a", 0.5), reduce(8, at::kFloat, "a", 0.25), "scaled by 0.5",
       "scaled by 0.25"},
      {"store", scatter(Store::kWrite), scatter(Store::kAdd), "reduce_scatter (sum) 'a'",
       "stored by add"},
  };
  for (const Disagreement& row : table) {
    const auto messages = messages_of(3, {}, [&](World& world) {
      Communicator& comm = world.communicator();
      comm.barrier("together").wait();
      EXPECT_THROW((world.rank() == 2 ? row.odd_one : row.most)(comm).wait(), CommError);
      comm.barrier("used again").wait();  // repeats its first error
    });
    for (const std::string& message : messages)
      EXPECT_THAT(message, AllOf(HasSubstr("stopped working"), HasSubstr("operation 1"),
                                 HasSubstr(row.words_of_most), HasSubstr(row.words_of_odd_one)))
          << row.name;
  }
}

TEST(ThreadsCommunicator, ShowsCountsThatDoNotMatch) {
  const auto messages = messages_of(2, {}, [](World& world) {
    const std::vector<int64_t> out = {2, 3};
    const std::vector<int64_t> in = {2, world.rank() == 0 ? int64_t{4} : int64_t{3}};
    const std::vector<int64_t>& kept = world.rank() == 0 ? out : in;
    world.communicator()
        .all_to_all(at::zeros({5}), at::zeros({in[0] + in[1]}), "letters", kept, in)
        .wait();
  });
  for (const std::string& message : messages)
    EXPECT_THAT(message, HasSubstr("rank 0 sends 4 elements to rank 1, which expects 2"));
}

TEST(ThreadsCommunicator, NamesWhoHasNotArrivedAtTheDeadline) {
  const auto messages = messages_of(4, {.timeout_seconds = 0.3}, [](World& world) {
    const std::vector<int> parity = {0, 1, 0, 1};
    const auto group = world.communicator().split(parity, "parity");
    // Odd ranks wait for each other in a wait that no deadline of theirs ends: rank 3 never calls.
    if (world.rank() == 1) group->barrier("odd ones out").wait();
    if (world.rank() == 3) return;
    if (world.rank() != 1) world.communicator().all_reduce(at::ones({8}), {}, "blocks.3").wait();
  });
  // Either even rank may give up first; all ranks get its message.
  EXPECT_THAT(messages[0],
              AnyOf(AllOf(HasSubstr("all_reduce (sum) 'blocks.3'"), HasSubstr("waited 0.3 s"),
                          HasSubstr("for rank 1, 3, which have not arrived")),
                    AllOf(HasSubstr("barrier 'odd ones out'"), HasSubstr("for rank 1"))));
  EXPECT_EQ(messages[3], "");
}

TEST(ThreadsCommunicator, GivesTheMessageOfAFailingRankToAllOthers) {
  const auto messages = messages_of(4, {}, [](World& world) {
    const Mesh mesh = world.mesh({.outer = 2});
    if (world.rank() == 2) throw Error("no space left for blocks.7");
    // Ranks 0 and 1 wait for rank 2 directly, or for each other's other axis.
    mesh.outer().reduce().barrier("column").wait();
    mesh.inner().reduce().barrier("row").wait();
    world.communicator().barrier("all").wait();
  });
  EXPECT_EQ(messages[2], "no space left for blocks.7");
  for (const int rank : {0, 1, 3})
    EXPECT_THAT(messages[static_cast<size_t>(rank)],
                HasSubstr("rank 2 failed: no space left for blocks.7"));
}

TEST(ThreadsCommunicator, LetsAFailingRankLeaveWithWorkInFlight) {
  // Rank 1's gather can never be completed; closing its communicator must not wait for it.
  const auto messages = messages_of(2, {}, [](World& world) {
    const std::vector<int> together = {0, 0};
    const auto group = world.communicator().split(together, "group");
    if (world.rank() == 1) {
      const Work pending = group->all_gather(at::zeros({2}), at::zeros({1}), "never");
      throw Error("rank 1 has had enough");
    }
    world.communicator().barrier("waits").wait();
  });
  EXPECT_THAT(messages[0], HasSubstr("rank 1 has had enough"));
}

TEST(ThreadsCommunicator, FailsWithTheErrorOfWhatItFollows) {
  const auto messages = messages_of(2, {}, [](World& world) {
    const std::vector<int> together = {0, 0};
    const auto second = world.communicator().split(together, "second");
    const auto third = world.communicator().split(together, "third");
    const int64_t numel = 8 + world.rank();  // they disagree
    const Work bad = world.communicator().all_reduce(at::ones({numel}), {}, "bad");
    const Work next = second->all_gather(at::zeros({16}), at::ones({8}), "next", {}, bad);
    third->reduce_scatter(at::zeros({8}), at::ones({16}), {}, "last", {}, next).wait();
  });
  for (const std::string& message : messages)
    EXPECT_THAT(message, AllOf(HasSubstr("disagree"), HasSubstr("all_reduce (sum) 'bad'"),
                               HasSubstr("36 bytes")));
}

// Each rank receives 20000 bytes in every one of these.
TEST(ThreadsCommunicator, LastsAsLongAsItsBytesTakeAtTheGivenBandwidth) {
  run_threads(2, {.bandwidth_bytes_per_s = 1e6}, [](World& world) {
    Communicator& comm = world.communicator();
    const at::Tensor whole = at::ones({20000}, at::kBFloat16);
    const at::Tensor share = at::ones({10000}, at::kBFloat16);
    const auto seconds = [](const Work& work, auto begin) {
      work.wait();
      return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
    };
    const auto now = [] { return std::chrono::steady_clock::now(); };
    auto begin = now();
    EXPECT_GE(seconds(comm.all_gather(whole, share, "gather"), begin), 0.02);
    begin = now();
    EXPECT_GE(seconds(comm.reduce_scatter(at::ones({10000}), whole, {}, "scatter"), begin), 0.02);
    begin = now();
    EXPECT_GE(seconds(comm.all_reduce(share, {}, "reduce"), begin), 0.02);
  });
  EXPECT_THAT([] { run_threads(1, {.bandwidth_bytes_per_s = -1}, [](World&) {}); },
              ThrowsMessage<Error>(HasSubstr("bandwidth_bytes_per_s is -1")));
}

TEST(ThreadsCommunicator, ThrowsTheCauseRatherThanItsConsequences) {
  EXPECT_THAT(
      [] {
        run_threads(3, {}, [](World& world) {
          if (world.rank() == 1) throw std::invalid_argument("the cause");
          world.communicator().barrier("waits").wait();
        });
      },
      ThrowsMessage<std::invalid_argument>(HasSubstr("the cause")));
}

TEST(SimulatedCommunicator, RecordsAnyWorldWithoutMovingAnything) {
  auto recording = std::make_shared<Recording>();
  World world = World::simulated(1234, 4096, recording);
  const Mesh mesh = world.mesh({.outer = 8});
  EXPECT_EQ(mesh.inner().size(), 512);
  EXPECT_EQ(mesh.inner().rank(), 1234 % 512);
  EXPECT_EQ(mesh.outer().rank(), 1234 / 512);
  at::Tensor whole = at::ones({512 * 4}, at::kBFloat16);
  mesh.inner().gather().all_gather(whole, at::zeros({4}, at::kBFloat16), "blocks.0").wait();
  mesh.outer().reduce().all_reduce(at::ones({4}), {.op = ReduceOp::kAvg}, "blocks.0").wait();
  EXPECT_TRUE((whole == 1).all().item<bool>());
  ASSERT_EQ(recording->size(), 2u);
  EXPECT_EQ((*recording)[0].communicator, "inner gather");
  EXPECT_EQ((*recording)[0].ranks, 512);
  EXPECT_EQ((*recording)[0].print.bytes, 512 * 4 * 2);
  EXPECT_EQ((*recording)[1].print.kind, OpKind::kAllReduce);
  EXPECT_EQ((*recording)[1].print.tag.text(), "blocks.0");
  EXPECT_THROW(mesh.inner().gather().all_gather(whole, at::zeros({5}, at::kBFloat16), "bad"),
               Error);
}

}  // namespace
}  // namespace fsdp::communicator_test
