// NCCL or host memory: the choice from what ranks say of their hosts and GPUs, which needs no GPU.
#include "fsdp/comm/transport.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <string>
#include <vector>

namespace fsdp::transport_test {
namespace {

using Places = std::vector<RankPlace>;

RankPlace place(const std::string& host, const std::string& gpu, NcclUse nccl = NcclUse::kAuto) {
  return {.host = host, .gpu = gpu, .has_nccl = true, .nccl = nccl};
}

const std::string kFirst = "0000:1B:00.0";
const std::string kSecond = "0000:43:00.0";

void expect_host_memory(const Places& ranks, const std::string& why) {
  const Transport transport = choose_transport(ranks);
  EXPECT_FALSE(transport.by_nccl);
  EXPECT_EQ(transport.why, why);
  EXPECT_EQ(transport.error, "");
}

// However many GPUs a rank sees: it says which one it computes on.
TEST(Transport, IsNcclWhereEachRankOfAHostHasAGpuOfItsOwn) {
  const Transport transport = choose_transport(Places{place("a", kFirst), place("a", kSecond)});
  EXPECT_TRUE(transport.by_nccl);
  EXPECT_EQ(sentence_of(transport, "TCP"),
            "tensors travel by NCCL: 2 ranks on 1 host, each with a GPU of its own");
}

TEST(Transport, IsNcclOnSeveralHostsWhoseGpusHaveEqualIds) {
  const Transport transport = choose_transport(
      Places{place("a", kFirst), place("a", kSecond), place("b", kFirst), place("b", kSecond)});
  EXPECT_TRUE(transport.by_nccl);
  EXPECT_EQ(transport.why, "4 ranks on 2 hosts, each with a GPU of its own");
}

TEST(Transport, IsHostMemoryWhereRanksShareAGpu) {
  const Places ranks = {place("a", kFirst), place("a", kSecond), place("b", kSecond),
                        place("b", kSecond)};
  expect_host_memory(ranks, "ranks 2 and 3 share the GPU 0000:43:00.0");
  EXPECT_EQ(
      sentence_of(choose_transport(ranks), "MPI"),
      "tensors travel through host memory over MPI: ranks 2 and 3 share the GPU 0000:43:00.0");
  EXPECT_EQ(ranks_on_gpu_of(1, ranks), 1);
  EXPECT_EQ(ranks_on_gpu_of(3, ranks), 2);
}

TEST(Transport, IsHostMemoryWhereARankHasNoGpu) {
  const Places ranks = {place("a", kFirst), place("b", "")};
  expect_host_memory(ranks, "rank 1 sees no GPU");
  EXPECT_EQ(ranks_on_gpu_of(1, ranks), 0);
  expect_host_memory({place("a", ""), place("a", "")}, "no rank sees a GPU");
}

TEST(Transport, IsHostMemoryWhereABuildHasNoNccl) {
  Places ranks = {place("a", kFirst), place("a", kSecond)};
  ranks[1].has_nccl = false;
  expect_host_memory(ranks, "the build of rank 1 has no NCCL");
}

TEST(Transport, IsWhatAllRanksSayWhateverTheirGpus) {
  using enum NcclUse;
  expect_host_memory({place("a", kFirst, kOff), place("a", kSecond, kOff)}, "NCCL is off");
  const Transport always =
      choose_transport(Places{place("a", kFirst, kAlways), place("a", kFirst, kAlways)});
  EXPECT_TRUE(always.by_nccl);
  EXPECT_EQ(always.why, "FSDP_NCCL is always");
}

TEST(Transport, IsAnErrorWhereRanksContradictEachOther) {
  const Transport transport = choose_transport(
      Places{place("a", kFirst), place("a", kSecond), place("a", "c", NcclUse::kOff)});
  EXPECT_FALSE(transport.by_nccl);
  EXPECT_EQ(transport.error,
            "FSDP_NCCL is off on rank 2 and auto on rank 0: set it alike on all ranks");
}

TEST(RankPlace, ComesBackFromItsText) {
  for (const NcclUse use : {NcclUse::kAuto, NcclUse::kOff, NcclUse::kAlways})
    for (const RankPlace& each : {place("node 1", kFirst, use), place("", "", use)})
      EXPECT_EQ(place_in(text_of(each)), each);
  RankPlace without_nccl = place("a", kFirst);
  without_nccl.has_nccl = false;
  EXPECT_EQ(place_in(text_of(without_nccl)), without_nccl);
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
