// How ranks find each other through a store, and what they say when they do not.
#include "fsdp/comm/tcp_mesh.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <string>
#include <thread>
#include <vector>

#include "fsdp/base/text.h"
#include "support/tcp_threads.h"

namespace fsdp {
namespace {

using ::testing::AllOf;
using ::testing::Each;
using ::testing::HasSubstr;
using testing::mesh_options;
using testing::run_beside;
using testing::run_connected;
using testing::StoreInMemory;

TEST(TcpMesh, ConnectsEachWithEach) {
  const std::vector<std::string> errors = run_connected(5, [](int rank,
                                                              std::vector<Socket> sockets) {
    const Deadline deadline = std::chrono::steady_clock::now() + std::chrono::seconds(10);
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

TEST(TcpMesh, WorksOverIpv6) {
  StoreInMemory store;
  const auto join = [&](int rank) {
    return [&store, rank] {
      TcpMeshOptions options = mesh_options(rank, 2);
      options.address = "::1";
      connect_tcp_mesh(store, options);
    };
  };
  const std::vector<std::string> errors = run_beside({join(0), join(1)});
  if (errors[0].find("cannot listen") != std::string::npos)
    GTEST_SKIP() << "skipped: " << errors[0];
  EXPECT_THAT(errors, Each(""));
}

TEST(TcpMesh, NamesTheRanksThatHaveNotJoined) {
  StoreInMemory store;
  const auto join = [&](int rank) {
    return [&store, rank] {
      TcpMeshOptions options = mesh_options(rank, 4);
      options.timeout_seconds = 0.5;
      connect_tcp_mesh(store, options);
    };
  };
  const std::vector<std::string> errors = run_beside({join(0), join(3)});
  EXPECT_EQ(errors[0],
            "rank 0 of 4 waited 0.5 s for rank 1, 2, which has not joined: look at what it says, "
            "or raise FSDP_TIMEOUT_S");
  EXPECT_THAT(errors[1], HasSubstr("for rank 1, which has not joined"));
}

TEST(TcpMesh, ShowsBothSidesWhenRanksDisagreeAboutTheSize) {
  StoreInMemory store;
  const std::vector<std::string> errors =
      run_beside({[&] { connect_tcp_mesh(store, mesh_options(0, 2)); },
                  [&] {
                    TcpMeshOptions options = mesh_options(1, 3);
                    options.timeout_seconds = 1;
                    connect_tcp_mesh(store, options);
                  },
                  [&] {
                    TcpMeshOptions options = mesh_options(2, 3);
                    options.timeout_seconds = 1;
                    connect_tcp_mesh(store, options);
                  }});
  EXPECT_THAT(errors[0], HasSubstr("rank 1 says WORLD_SIZE=3, but rank 0 says WORLD_SIZE=2"));
  for (const size_t rank : {1U, 2U})
    EXPECT_EQ(errors[rank], concat("rank 0 says WORLD_SIZE=2, but rank ", rank,
                                   " says WORLD_SIZE=3: start all processes of a job with the "
                                   "same number"));
}

TEST(TcpMesh, RefusesTwoProcessesOfTheSameRank) {
  StoreInMemory store;
  const auto join = [&](int rank) {
    return [&store, rank] {
      TcpMeshOptions options = mesh_options(rank, 3);
      options.timeout_seconds = 1;
      connect_tcp_mesh(store, options);
    };
  };
  const std::vector<std::string> errors = run_beside({join(0), join(1), join(1)});
  EXPECT_EQ(errors[0], "two processes say RANK=1: every process of a job needs its own");
}

TEST(TcpMesh, TellsOfAnAddressThatOthersCannotReach) {
  StoreInMemory store;
  store.publish("test/0", "2 10.1.2.3 4444 1");
  const std::vector<std::string> errors =
      run_beside({[&] { connect_tcp_mesh(store, mesh_options(1, 2)); }});
  EXPECT_THAT(errors[0], AllOf(HasSubstr("rank 0 listens at 10.1.2.3 and rank 1 at 127.0.0.1"),
                               HasSubstr("set FSDP_HOST_ADDRESS")));
}

// What an earlier round left: a port where nobody listens, a port of somebody else, another size.
TEST(TcpMesh, WaitsForThisRoundsEntriesWhenTheStoreHoldsOldOnes) {
  const Socket stranger = listen_at("127.0.0.1", 5);
  const std::string strange_port = std::to_string(endpoint_of(stranger).port);
  for (const std::string& old :
       {std::string("2 127.0.0.1 1 5"), "3 127.0.0.1 " + strange_port + " 5"}) {
    StoreInMemory store;
    store.publish("test/0", old);
    const auto join = [&](int rank) {
      return [&store, rank] {
        if (rank == 0) std::this_thread::sleep_for(std::chrono::milliseconds(300));
        TcpMeshOptions options = mesh_options(rank, 2);
        options.seconds_for_old_entries = 10;
        connect_tcp_mesh(store, options);
      };
    };
    EXPECT_THAT(run_beside({join(0), join(1)}), Each("")) << old;
  }
}

TEST(TcpMesh, IgnoresStrangersWhoCall) {
  StoreInMemory store;
  std::vector<Socket> strangers;
  const Deadline deadline = std::chrono::steady_clock::now() + std::chrono::seconds(10);
  const auto join = [&](int rank) {
    return [&store, rank] { connect_tcp_mesh(store, mesh_options(rank, 2)); };
  };
  const auto call = [&] {
    std::optional<std::string> entry;
    while (!(entry = store.find("test/0")))
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    const std::string after_host = entry->substr(entry->find(' ', 2) + 1);
    for (int i = 0; i < 3; ++i)  // one is silent, one talks nonsense, one hangs up
      strangers.push_back(try_connect({"127.0.0.1", std::stoi(after_host)}, deadline));
    send_all(strangers[1], "GET / HTTP/1.1 and more of that kind", 36, deadline);
    strangers[2].close();
  };
  EXPECT_THAT(run_beside({join(0), call,
                          [&] {
                            std::this_thread::sleep_for(std::chrono::milliseconds(200));
                            join(1)();
                          }}),
              Each(""));
}

}  // namespace
}  // namespace fsdp
