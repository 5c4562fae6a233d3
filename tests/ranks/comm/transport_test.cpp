// NCCL or host memory: the choice from what ranks say of their hosts and GPUs, which needs no GPU.
#include "fsdp/comm/rank_facts.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <string>
#include <vector>

#include "support/run_ranks.h"

namespace fsdp::transport_test {
namespace {

using Places = std::vector<RankPlace>;

RankPlace place(const std::string& host, const std::string& gpu, NcclUse nccl = NcclUse::kAuto) {
  return {.host = host, .gpu = gpu, .has_nccl = true, .nccl = nccl};
}

const std::string kFirst = "0000:1B:00.0";
const std::string kSecond = "0000:43:00.0";

// However many GPUs a rank sees: it says which one it computes on.
TEST(Transport, IsNcclWhereEachRankOfAHostHasAGpuOfItsOwnOrAllSaySo) {
  using enum NcclUse;
  const std::string in_groups = "; gradients are added in groups of 2 ranks first";
  const struct {
    Places ranks;
    bool by_nccl;
    std::string why;
  } cases[] = {
      {{place("a", kFirst), place("a", kSecond)},
       true,
       "2 ranks on 1 host, each with a GPU of its own"},
      // Equal ids on two hosts are two GPUs.
      {{place("a", kFirst), place("a", kSecond), place("b", kFirst), place("b", kSecond)},
       true,
       "4 ranks on 2 hosts, each with a GPU of its own" + in_groups},
      {{place("a", kFirst), place("a", kSecond), place("b", kSecond), place("b", kSecond)},
       false,
       "ranks 2 and 3 share the GPU 0000:43:00.0" + in_groups},
      {{place("a", kFirst), place("b", "")}, false, "rank 1 sees no GPU"},
      {{place("a", ""), place("a", "")}, false, "no rank sees a GPU"},
      {{place("a", kFirst), {.host = "a", .gpu = kSecond}},
       false,
       "the build of rank 1 has no NCCL"},
      {{place("a", kFirst, kOff), place("a", kSecond, kOff)}, false, "NCCL is off"},
      {{place("a", kFirst, kAlways), place("a", kFirst, kAlways)}, true, "FSDP_NCCL is always"}};
  for (const auto& [ranks, by_nccl, why] : cases) {
    const Transport transport = choose_transport(ranks, "MPI");
    EXPECT_EQ(transport.by_nccl, by_nccl) << why;
    EXPECT_EQ(transport.sentence, (by_nccl ? "tensors travel by NCCL: "
                                           : "tensors travel through host memory over MPI: ") +
                                      why);
    EXPECT_EQ(transport.error, "") << why;
  }
}

TEST(Transport, AddsTheRanksOfAHostFirst) {
  const auto on_hosts = [](const std::vector<std::string>& hosts, int given = 0) {
    Places ranks;
    for (const std::string& host : hosts)
      ranks.push_back({.host = host, .gpu = "", .sum_group = given});
    return choose_transport(ranks, "TCP");
  };
  EXPECT_EQ(on_hosts({"a", "a", "b", "b"}).sum_group, 2);
  EXPECT_THAT(on_hosts({"a", "a", "b", "b"}).sentence,
              ::testing::HasSubstr("; gradients are added in groups of 2 ranks first"));
  EXPECT_EQ(on_hosts({"a", "a", "a", "a"}).sum_group, 4);
  EXPECT_EQ(on_hosts({"a", "a", "a", "b", "b", "b", "b", "b", "b"}).sum_group, 3);
  EXPECT_EQ(on_hosts({"a", "b", "a", "b"}).sum_group, 1) << "neighbours alone";
  EXPECT_THAT(on_hosts({"a", "b", "a", "b"}).sentence,
              ::testing::Not(::testing::HasSubstr("groups")));
  EXPECT_EQ(on_hosts({"a", "b", "a", "b"}, 2).sum_group, 2) << "as asked for";
  Places odd(2, {.host = "a", .gpu = ""});
  odd[1].sum_group = 2;
  EXPECT_EQ(choose_transport(odd, "TCP").error,
            "FSDP_SUM_GROUP is 2 on rank 1 and 0 on rank 0: set it alike on all ranks (0 is the "
            "ranks of a host)");
}

TEST(Transport, CountsTheRanksOfAGpu) {
  const Places ranks = {place("a", kFirst), place("a", kSecond), place("b", kSecond),
                        place("b", kSecond), place("b", "")};
  EXPECT_EQ(ranks_on_gpu_of(1, ranks), 1);
  EXPECT_EQ(ranks_on_gpu_of(3, ranks), 2);
  EXPECT_EQ(ranks_on_gpu_of(4, ranks), 0);
}

TEST(Transport, IsAnErrorWhereRanksContradictEachOther) {
  const Transport transport = choose_transport(
      Places{place("a", kFirst), place("a", kSecond), place("a", "c", NcclUse::kOff)}, "TCP");
  EXPECT_FALSE(transport.by_nccl);
  EXPECT_EQ(transport.error,
            "FSDP_NCCL is off on rank 2 and auto on rank 0: set it alike on all ranks");
}

TEST(RankPlace, IsKnownToAllRanks) {
  using enum NcclUse;
  Places places = {place("node 1", kFirst), place("", "", kOff), place("a", "", kAlways)};
  places[2].has_nccl = false;
  places[2].sum_group = 16;
  testing::run_ranks(3, [&](World& world) {
    const RankPlace& own = places[static_cast<size_t>(world.rank())];
    EXPECT_EQ(places_of_ranks(world.communicator(), own), places);
  });
}

TEST(RankPlace, IsOnTheHostThatNcclTakesItFor) {
  const std::string own = this_host();
  EXPECT_THAT(own, ::testing::MatchesRegex(".+ [0-9a-f-]+"));
  EXPECT_EQ(this_host(), own);
  ::setenv("NCCL_HOSTID", "another", 1);
  EXPECT_EQ(this_host(), "another");
  ::unsetenv("NCCL_HOSTID");
}

}  // namespace
}  // namespace fsdp::transport_test
