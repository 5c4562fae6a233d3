// How ranks find each other, which callers may join, and the errors when something is wrong.
#include "fsdp/comm/tcp/tcp_mesh.h"

#include <sys/resource.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <string>
#include <thread>
#include <vector>

#include "fsdp/base/text.h"
#include "support/tcp_threads.h"

namespace fsdp::tcp_mesh_test {
namespace {

using ::testing::AllOf;
using ::testing::AnyOf;
using ::testing::Each;
using ::testing::HasSubstr;
using testing::mesh_options;
using testing::PlaceInMemory;
using testing::run_beside;
using testing::run_connected;

using Clock = std::chrono::steady_clock;

Deadline in_seconds(int seconds) { return Clock::now() + std::chrono::seconds(seconds); }

// Waits until rank 0 listens.
Endpoint wait_for(PlaceInMemory& place) {
  std::optional<Endpoint> endpoint;
  while (!(endpoint = place.find())) std::this_thread::yield();
  return *endpoint;
}

Socket introduced(const Endpoint& rank_0, const Introduction& own) {
  Handshake handshake =
      Handshake::as_caller(try_connect(rank_0, in_seconds(5)), job_key("", "test"), own, 0);
  while (handshake.advance() == Handshake::State::kGoing) std::this_thread::yield();
  return handshake.take_socket();
}

// One rank's part; the options may be changed.
std::function<void()> join(PlaceInMemory& place, int rank, int size,
                           const std::function<void(TcpMeshOptions&)>& change = {}) {
  return [&place, rank, size, change] {
    TcpMeshOptions options = mesh_options(rank, size);
    if (change) change(options);
    connect_tcp_mesh(place, options);
  };
}

std::function<void(TcpMeshOptions&)> within(double seconds) {
  return [seconds](TcpMeshOptions& options) { options.timeout_seconds = seconds; };
}

TEST(TcpMesh, ConnectsEachWithEach) {
  const std::vector<std::string> errors = run_connected(5, [](int rank, TcpMesh mesh) {
    std::vector<Socket>& sockets = mesh.sockets;
    const Deadline deadline = in_seconds(10);
    for (int peer = 0; peer < 5; ++peer) {
      const Socket& socket = sockets[static_cast<size_t>(peer)];
      EXPECT_EQ(static_cast<bool>(socket), peer != rank);
      if (!socket) continue;
      EXPECT_TRUE(send_all(socket, &rank, sizeof(rank), deadline));
    }
    for (int peer = 0; peer < 5; ++peer) {
      if (peer == rank) continue;
      int heard = -1;
      EXPECT_TRUE(receive_all(sockets[static_cast<size_t>(peer)], &heard, sizeof(heard), deadline));
      EXPECT_EQ(heard, peer);
    }
  });
  EXPECT_THAT(errors, Each(""));
}

// Rank 0's part is one connection for each rank and two tables; here with 999 that are no threads.
TEST(TcpMesh, AThousandRanksJoinRank0) {
  constexpr int kRanks = 1000;
  rlimit limit{};
  ::getrlimit(RLIMIT_NOFILE, &limit);
  if (limit.rlim_max < 2 * kRanks + 100) GTEST_SKIP() << "skipped: needs ulimit -n 2100";
  limit.rlim_cur = limit.rlim_max;
  ::setrlimit(RLIMIT_NOFILE, &limit);
  PlaceInMemory place;
  const std::vector<std::string> errors = run_beside(
      {join(place, 0, kRanks), [&] {
         const Endpoint rank_0 = wait_for(place);
         std::vector<Handshake> calls;
         std::vector<Socket> sockets;
         for (int rank = 1; rank < kRanks; ++rank)
           calls.push_back(Handshake::as_caller(start_connecting(rank_0), job_key("", "test"),
                                                {.rank = rank, .size = kRanks}, 0));
         while (!calls.empty())
           std::erase_if(calls, [&](Handshake& call) {
             if (call.advance() != Handshake::State::kDone) return false;
             sockets.push_back(call.take_socket());
             return true;
           });
         std::vector<char> table(8 + kRanks * sizeof(Introduction));
         for (const Socket& socket : sockets)
           EXPECT_TRUE(receive_all(socket, table.data(), table.size(), in_seconds(20)));
         for (const Socket& socket : sockets) EXPECT_TRUE(send_all(socket, "1", 1, in_seconds(20)));
         for (const Socket& socket : sockets)
           EXPECT_TRUE(receive_all(socket, table.data(), 8, in_seconds(20)));
       }});
  EXPECT_THAT(errors, Each(""));
}

TEST(TcpMesh, WorksOverIpv6) {
  PlaceInMemory place;
  const auto over_ipv6 = [](TcpMeshOptions& options) { options.listen.host = "::1"; };
  const std::vector<std::string> errors =
      run_beside({join(place, 0, 2, over_ipv6), join(place, 1, 2, [&](TcpMeshOptions& options) {
                    over_ipv6(options);
                    options.timeout_seconds = 5;
                  })});
  if (errors[0].find("cannot listen") != std::string::npos)
    GTEST_SKIP() << "skipped: " << errors[0];
  EXPECT_THAT(errors, Each(""));
}

TEST(TcpMesh, OthersListenAtTheAddressFromWhichTheyReachRank0) {
  PlaceInMemory place;
  const auto anywhere = [](TcpMeshOptions& options) { options.listen = {}; };
  EXPECT_THAT(
      run_beside({join(place, 0, 3), join(place, 1, 3, anywhere), join(place, 2, 3, anywhere)}),
      Each(""));
}

TEST(TcpMesh, TellsEverybodyWhoHasNotJoined) {
  PlaceInMemory place;
  const std::vector<std::string> errors =
      run_beside({join(place, 0, 4, within(0.5)), join(place, 3, 4, within(0.5))});
  EXPECT_EQ(errors[0],
            "rank 0 of 4 waited 0.5 s for rank 1, 2, which has not joined: look at what it says, "
            "or raise FSDP_TIMEOUT_S");
  EXPECT_EQ(errors[1], errors[0]);
}

TEST(TcpMesh, SaysWhereRank0ShouldBe) {
  PlaceInMemory place;
  EXPECT_THAT(run_beside({join(place, 1, 2, within(0.1))}),
              Each(HasSubstr("rank 0 has not said where it listens after 0.1 s")));
  const Endpoint nobody{"127.0.0.1", endpoint_of(listen_at({"127.0.0.1", 0})).port};
  place.announce(nobody);
  EXPECT_THAT(run_beside({join(place, 1, 2, within(0.1))}),
              Each(HasSubstr(concat("rank 0 has not answered at ", nobody.text()))));
}

TEST(TcpMesh, ShowsBothSidesWhenRanksDisagreeAboutTheSize) {
  PlaceInMemory place;
  const std::vector<std::string> errors = run_beside({join(place, 0, 2), join(place, 1, 3)});
  const std::string hint = ": start all processes of a job with the same number";
  EXPECT_EQ(errors[0], "rank 1 says WORLD_SIZE=3, but rank 0 says WORLD_SIZE=2" + hint);
  EXPECT_EQ(errors[1], "rank 0 says WORLD_SIZE=2, but rank 1 says WORLD_SIZE=3" + hint);
}

TEST(TcpMesh, RefusesTwoProcessesOfTheSameRank) {
  PlaceInMemory place;
  const std::vector<std::string> errors = run_beside(
      {join(place, 0, 3, within(5)), join(place, 1, 3, within(5)), join(place, 1, 3, within(5))});
  EXPECT_EQ(errors[0], "two processes say RANK=1: every process of a job needs its own");
}

TEST(TcpMesh, TellsOfAnAddressThatOthersCannotReach) {
  PlaceInMemory place;
  Introduction elsewhere{.rank = 1, .size = 3};
  elsewhere.set_endpoint({"10.1.2.3", 4444});
  const std::vector<std::string> errors =
      run_beside({join(place, 0, 3, within(5)), join(place, 2, 3, within(5)), [&] {
                    const Socket socket = introduced(wait_for(place), elsewhere);
                    char byte = 0;
                    while (receive_all(socket, &byte, 1, in_seconds(5))) {
                    }
                  }});
  EXPECT_THAT(errors[1], AllOf(HasSubstr("rank 1 listens at 10.1.2.3 and rank 2 at 127.0.0.1"),
                               HasSubstr("set FSDP_HOST_ADDRESS")));
}

// A rank is gone before the last one has come: no rank waits for the deadline.
TEST(TcpMesh, EverybodyHearsOfARankThatEndsBeforeAllHaveJoined) {
  PlaceInMemory place;
  std::string heard;
  const std::vector<std::string> errors =
      run_beside({join(place, 0, 4), [&] {
                    const Endpoint rank_0 = wait_for(place);
                    const Socket rank_2 = introduced(rank_0, {.rank = 2, .size = 4});
                    introduced(rank_0, {.rank = 1, .size = 4}).close();
                    for (char letter = 0; receive_all(rank_2, &letter, 1, in_seconds(5));)
                      heard += letter;
                  }});
  EXPECT_EQ(errors[0], "rank 1 left before all ranks had joined; look at what it said last");
  EXPECT_THAT(heard, HasSubstr(errors[0]));
}

// Rank 1 dies after it has heard where the others are.
TEST(TcpMesh, EverybodyHearsOfARankThatEndsBeforeAllHaveMet) {
  PlaceInMemory place;
  const std::vector<std::string> errors =
      run_beside({join(place, 0, 4), join(place, 2, 4), join(place, 3, 4), [&] {
                    Introduction own{.rank = 1, .size = 4};
                    const Socket listener = listen_at({"127.0.0.1", 0});
                    own.set_endpoint(endpoint_of(listener));
                    const Socket rank_0 = introduced(wait_for(place), own);
                    char byte = 0;
                    receive_all(rank_0, &byte, 1, in_seconds(20));
                  }});
  EXPECT_EQ(errors[0], "rank 1 left before all ranks had met; look at what it said last");
  for (const size_t rank : {1U, 2U})
    EXPECT_THAT(errors[rank], AnyOf(errors[0], HasSubstr("cannot reach rank 1")));
}

// Leftovers of an earlier round: a port where nobody listens, a port of another program, and of a
// rank 0 of another round.
TEST(TcpMesh, WaitsForThisRoundsRank0WhenTheStoreHoldsAnOldOne) {
  const Socket stranger = listen_at({"127.0.0.1", 0});
  std::atomic<bool> is_over{false};
  std::thread hang_up([&] {
    while (!is_over) {
      try_accept(stranger).close();
      std::this_thread::yield();
    }
  });
  PlaceInMemory old_round;
  std::thread old_rank_0([&] {
    TcpMeshOptions options = mesh_options(0, 2);
    options.meeting = "an old one";
    options.timeout_seconds = 1;
    EXPECT_THROW(connect_tcp_mesh(old_round, options), std::exception);
  });
  for (const Endpoint& old :
       {Endpoint{"127.0.0.1", 1}, endpoint_of(stranger), wait_for(old_round)}) {
    PlaceInMemory place;
    place.announce(old);
    EXPECT_THAT(
        run_beside({[&] {
                      while (place.num_finds() < 4) std::this_thread::yield();
                      join(place, 0, 2)();
                    },
                    join(place, 1, 2,
                         [](TcpMeshOptions& options) { options.seconds_for_old_entries = 10; })}),
        Each(""))
        << old.text();
  }
  is_over = true;
  hang_up.join();
  old_rank_0.join();
}

// --- who may join ---

std::function<void(TcpMeshOptions&)> knowing(const std::string& secret) {
  return [secret](TcpMeshOptions& options) {
    options.secret = secret;
    options.timeout_seconds = 2;
  };
}

TEST(TcpMesh, ARankWithAnotherSecretEndsTheMeetingOnBothSides) {
  const auto knows = [](const std::string& secret) {
    return [secret](TcpMeshOptions& options) {
      options.secret = secret;
      options.seconds_for_strangers = 0;
    };
  };
  for (const std::string other : {"", "another"}) {
    PlaceInMemory place;
    const std::vector<std::string> errors =
        run_beside({join(place, 0, 2, knows("the right one")), join(place, 1, 2, knows(other))});
    EXPECT_THAT(errors[1], HasSubstr("rank 0 and rank 1 have not the same FSDP_SECRET"));
    EXPECT_THAT(errors[0], HasSubstr("rank 1 and rank 0 have not the same FSDP_SECRET"));
  }
}

// A stranger calls as rank 1 without the secret: he gets no connection and no addresses, and the
// job connects the real rank 1.
TEST(TcpMesh, AStrangerWhoCallsAsARankIsNotLetIn) {
  PlaceInMemory place;
  Handshake::State answer = Handshake::State::kGoing;
  const auto stranger = [&] {
    Handshake handshake =
        Handshake::as_caller(try_connect(wait_for(place), in_seconds(5)),
                             job_key("guessed", "test"), {.rank = 1, .size = 2}, 0);
    while ((answer = handshake.advance()) == Handshake::State::kGoing) std::this_thread::yield();
    join(place, 1, 2, knowing("the right one"))();
  };
  EXPECT_THAT(run_beside({join(place, 0, 2, knowing("the right one")), stranger}), Each(""));
  EXPECT_EQ(answer, Handshake::State::kOtherKey);
}

TEST(TcpMesh, NobodyListensAnyMoreWhenAllHaveMet) {
  PlaceInMemory place;
  EXPECT_THAT(run_beside({join(place, 0, 3), join(place, 1, 3), join(place, 2, 3)}), Each(""));
  EXPECT_FALSE(try_connect(*place.find(), in_seconds(5)));
}

// More silent callers than a job lets wait, nonsense, and a caller that hangs up.
TEST(TcpMesh, FormsInSpiteOfStrangersWhoCall) {
  PlaceInMemory place;
  std::vector<Socket> strangers;
  const auto call = [&] {
    const Endpoint endpoint = wait_for(place);
    for (int i = 0; i < 300; ++i) strangers.push_back(try_connect(endpoint, in_seconds(5)));
    const std::string nonsense(200, 'x');
    send_all(strangers[298], nonsense.data(), nonsense.size(), in_seconds(5));
    strangers[299].close();
    join(place, 1, 2)();
  };
  EXPECT_THAT(run_beside({join(place, 0, 2), call}), Each(""));
}

}  // namespace
}  // namespace fsdp::tcp_mesh_test
