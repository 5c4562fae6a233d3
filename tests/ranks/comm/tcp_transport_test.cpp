// Messages over TCP between ranks that are threads: order, flow, disagreement, and ends.
#include "fsdp/comm/tcp/tcp_transport.h"
#include "fsdp/base/text.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <latch>
#include <numeric>
#include <thread>
#include <vector>

#include "support/error_of.h"
#include "support/tcp_threads.h"

namespace fsdp::tcp_transport_test {
namespace {

using ::testing::AllOf;
using ::testing::Each;
using ::testing::HasSubstr;
using testing::run_connected;

using Clock = std::chrono::steady_clock;

constexpr int64_t kSmallBytes = 1000;
constexpr int64_t kLargeBytes = int64_t{5} << 20;  // more than sockets hold

Purpose within(double seconds) { return {.what = "this test", .timeout_seconds = seconds}; }

std::vector<char> pattern(int64_t bytes, int seed) {
  std::vector<char> data(static_cast<size_t>(bytes));
  for (size_t i = 0; i < data.size(); ++i)
    data[i] = static_cast<char>(i * 7 + i / 251 + static_cast<size_t>(seed));
  return data;
}

void send(TcpTransport& transport, int channel, int peer, std::vector<char> data) {
  const Message message{peer, data.data(), static_cast<int64_t>(data.size())};
  transport.exchange(channel, {&message, 1}, {}, within(20));
}

std::vector<char> receive(TcpTransport& transport, int channel, int peer, int64_t bytes,
                          double seconds = 20) {
  std::vector<char> data(static_cast<size_t>(bytes));
  const Message message{peer, data.data(), bytes};
  transport.exchange(channel, {}, {&message, 1}, within(seconds));
  return data;
}

void run_transports(int size, const std::function<void(TcpTransport&)>& body) {
  const std::vector<std::string> errors = run_connected(size, [&](int rank, TcpMesh mesh) {
    TcpTransport transport(rank, std::move(mesh));
    body(transport);
  });
  EXPECT_THAT(errors, Each(""));
}

TEST(TcpTransport, MovesMessagesOfEverySizeBothWaysAtOnce) {
  const std::vector<int64_t> sizes = {1,
                                      kSmallBytes,
                                      TcpTransport::kEagerBytes,
                                      TcpTransport::kEagerBytes + 1,
                                      TcpConnection::kMaxFrameBytes,
                                      TcpConnection::kMaxFrameBytes + 1,
                                      kLargeBytes};
  run_transports(3, [&](TcpTransport& transport) {
    for (const int64_t bytes : sizes) {
      std::vector<char> own = pattern(bytes, transport.rank());
      std::vector<std::vector<char>> theirs(3, std::vector<char>(own.size()));
      std::vector<Message> sends;
      std::vector<Message> receives;
      for (int peer = 0; peer < 3; ++peer) {
        if (peer == transport.rank()) continue;
        sends.push_back({peer, own.data(), bytes});
        receives.push_back({peer, theirs[static_cast<size_t>(peer)].data(), bytes});
      }
      transport.exchange(1, sends, receives, within(20));
      for (const Message& message : receives)
        EXPECT_EQ(theirs[static_cast<size_t>(message.peer)], pattern(bytes, message.peer));
    }
  });
}

TEST(TcpTransport, KeepsMessagesThatComeBeforeTheyAreAskedFor) {
  run_transports(2, [](TcpTransport& transport) {
    if (transport.rank() == 0) {
      for (int i = 0; i < 20; ++i) send(transport, 1, 1, pattern(kSmallBytes + i, i));
      send(transport, 2, 1, pattern(kSmallBytes, 77));
    } else {
      EXPECT_EQ(receive(transport, 2, 0, kSmallBytes), pattern(kSmallBytes, 77));
      for (int i = 0; i < 20; ++i)
        EXPECT_EQ(receive(transport, 1, 0, kSmallBytes + i), pattern(kSmallBytes + i, i));
    }
  });
}

// More than the receiver keeps for a peer: the rest waits at the sender, but the other channel does
// not.
TEST(TcpTransport, ASenderThatIsFarAheadWaitsWhenTheReceiversWindowIsFull) {
  constexpr int kMessages = 400;  // 25 MiB, three windows
  std::atomic<int> num_sent{0};
  run_transports(2, [&](TcpTransport& transport) {
    const int64_t bytes = TcpTransport::kEagerBytes;
    if (transport.rank() == 0) {
      std::thread ahead([&] {
        for (int i = 0; i < kMessages; ++i) {
          send(transport, 1, 1, pattern(bytes - i, i));
          ++num_sent;
        }
      });
      for (int i = 0; i < 50; ++i) send(transport, 2, 1, pattern(kSmallBytes, i));
      ahead.join();
    } else {
      for (int i = 0; i < 50; ++i)
        EXPECT_EQ(receive(transport, 2, 0, kSmallBytes), pattern(kSmallBytes, i));
      EXPECT_LT(num_sent * bytes, TcpTransport::kWindowBytes + 2 * bytes);
      for (int i = 0; i < kMessages; ++i)
        EXPECT_EQ(receive(transport, 1, 0, bytes - i), pattern(bytes - i, i));
    }
  });
  EXPECT_EQ(num_sent, kMessages);
}

// The large message is under way, or asked for, while others use the same connection.
TEST(TcpTransport, LetsChannelsPassALargeMessageThatNobodyTakes) {
  run_transports(2, [](TcpTransport& transport) {
    const int peer = 1 - transport.rank();
    std::thread large([&] {
      if (transport.rank() == 0) return send(transport, 9, peer, pattern(kLargeBytes, 1));
    });
    for (int i = 0; i < 100; ++i) {
      std::vector<char> own = pattern(kSmallBytes, i);
      std::vector<char> theirs(own.size());
      const Message out{peer, own.data(), kSmallBytes};
      const Message in{peer, theirs.data(), kSmallBytes};
      transport.exchange(3, {&out, 1}, {&in, 1}, within(20));
      EXPECT_EQ(theirs, own);
    }
    if (transport.rank() == 1) {
      EXPECT_EQ(receive(transport, 9, peer, kLargeBytes), pattern(kLargeBytes, 1));
    }
    large.join();
  });
}

// Sender's and receiver's sizes, below and above the limit for sending at once.
class Disagreement : public ::testing::TestWithParam<std::pair<int64_t, int64_t>> {};

TEST_P(Disagreement, AboutASizeIsAnErrorOnBothSidesAtOnce) {
  const auto [sent, expected] = GetParam();
  const std::vector<std::string> errors = run_connected(2, [&](int rank, TcpMesh mesh) {
    TcpTransport transport(rank, std::move(mesh));
    try {
      if (rank == 0) send(transport, 1, 1, pattern(sent, 0));
      receive(transport, 1, 1 - rank, expected, 10);
    } catch (const AbortedError&) {
      throw;
    } catch (const std::exception& error) {
      transport.tell_everybody(error.what(), MessageTransport::Words::kFinal);
      throw;
    }
  });
  EXPECT_THAT(errors, Each(AllOf(HasSubstr(concat("sent ", sent, " bytes where ", expected)),
                                 HasSubstr("FSDP_CHECKED=1"))));
}

INSTANTIATE_TEST_SUITE_P(Sizes, Disagreement,
                         ::testing::Values(std::pair(kSmallBytes, kSmallBytes + 1),
                                           std::pair(kSmallBytes, kLargeBytes),
                                           std::pair(kLargeBytes, kSmallBytes),
                                           std::pair(kLargeBytes, kLargeBytes - 1)));

TEST(TcpTransport, NamesWhoIsMissingAtTheDeadline) {
  std::atomic<bool> is_over{false};
  const std::vector<std::string> errors = run_connected(3, [&](int rank, TcpMesh mesh) {
    TcpTransport transport(rank, std::move(mesh));
    if (rank == 0) {
      try {
        receive(transport, 1, 2, kSmallBytes, 0.3);
      } catch (const TimeoutError&) {
        is_over = true;
        is_over.notify_all();
        throw;
      }
    }
    is_over.wait(false);
  });
  EXPECT_EQ(errors[0],
            "this test waited 0.3 s for world rank 2, which has not arrived; look at what it does "
            "instead, or raise FSDP_TIMEOUT_S");
}

TEST(TcpTransport, NamesARankWhoseConnectionEndsWithoutGoodbyeAtOnce) {
  const std::vector<std::string> errors = run_connected(3, [](int rank, TcpMesh mesh) {
    if (rank == 2) return;  // the sockets close
    TcpTransport transport(rank, std::move(mesh));
    receive(transport, 1, 1 - rank, kSmallBytes);  // from a rank that lives
  });
  EXPECT_EQ(errors[0], "rank 2 is gone: its connection was closed; look at what it said last");
  EXPECT_EQ(errors[1], errors[0]);
}

TEST(TcpTransport, GoodbyeIsAnErrorOnlyToThoseWhoNeedTheRank) {
  const std::vector<std::string> errors = run_connected(3, [](int rank, TcpMesh mesh) {
    TcpTransport transport(rank, std::move(mesh));
    if (rank == 2) return;
    if (rank == 0) send(transport, 1, 1, pattern(kLargeBytes, 0));
    if (rank == 0) return;
    EXPECT_EQ(receive(transport, 1, 0, kLargeBytes), pattern(kLargeBytes, 0));
    receive(transport, 1, 2, kSmallBytes);
  });
  EXPECT_EQ(errors[0], "");
  EXPECT_THAT(errors[1], HasSubstr("this test needs world rank 2, which has left the job"));
}

// In a large job ranks are connected when they have something to say, whoever speaks first.
TEST(TcpTransport, ConnectsRanksByTheirFirstMessage) {
  constexpr int kRanks = 5;
  const auto errors = run_connected(
      kRanks,
      [](int rank, TcpMesh mesh) {
        for (int other = 0; other < kRanks; ++other)
          EXPECT_EQ(static_cast<bool>(mesh.sockets[static_cast<size_t>(other)]),
                    rank != other && (rank == 0 || other == 0));
        TcpTransport transport(rank, std::move(mesh));
        for (const int64_t bytes : {kSmallBytes, kLargeBytes})
          for (int step = 1; step < kRanks; ++step) {
            const int to = (rank + step) % kRanks;
            const int from = (rank + kRanks - step) % kRanks;
            std::vector<char> sent = pattern(bytes, rank);
            std::vector<char> received(static_cast<size_t>(bytes));
            const Message send{to, sent.data(), bytes};
            const Message receive{from, received.data(), bytes};
            transport.exchange(1, {&send, 1}, {&receive, 1}, within(20));
            EXPECT_EQ(received, pattern(bytes, from));
          }
      },
      /*max_meshed_ranks=*/0);
  EXPECT_THAT(errors, Each(""));
}

// Ranks 1 and 2 have no connection, and rank 0 passes on what it notices.
TEST(TcpTransport, FailuresReachRanksThatHaveNoConnection) {
  const auto errors = run_connected(
      3,
      [](int rank, TcpMesh mesh) {
        if (rank == 2) return;  // the sockets close
        TcpTransport transport(rank, std::move(mesh));
        if (rank == 0) receive(transport, 1, 1, kSmallBytes);
        if (rank == 1) receive(transport, 1, 2, kSmallBytes);
      },
      /*max_meshed_ranks=*/0);
  EXPECT_EQ(errors[0], "rank 2 is gone: its connection was closed; look at what it said last");
  EXPECT_EQ(errors[1], errors[0]);
}

TEST(TcpTransport, ACalledRankThatHasLeftIsNamed) {
  std::latch left(1);
  std::latch over(1);
  const auto errors = run_connected(
      3,
      [&](int rank, TcpMesh mesh) {
        if (rank == 1) {
          TcpTransport(rank, std::move(mesh));
          return left.count_down();
        }
        TcpTransport transport(rank, std::move(mesh));
        if (rank == 0) return over.wait();
        left.wait();
        EXPECT_THAT(testing::error_of([&] { send(transport, 1, 1, pattern(kSmallBytes, 0)); }),
                    HasSubstr("rank 2 cannot reach rank 1 at 127.0.0.1"));
        over.count_down();
      },
      /*max_meshed_ranks=*/0);
  EXPECT_THAT(errors, Each(""));
}

TEST(TcpTransport, WordsAboutAFailureReachARankThatIsBusyReceiving) {
  const std::vector<std::string> errors = run_connected(3, [](int rank, TcpMesh mesh) {
    TcpTransport transport(rank, std::move(mesh));
    if (rank == 2) {
      transport.tell_everybody("in passing", MessageTransport::Words::kInPassing);
      transport.tell_everybody("rank 2 failed: no space", MessageTransport::Words::kFinal);
      return;
    }
    receive(transport, 1, 1 - rank, kLargeBytes);
  });
  EXPECT_EQ(errors[0], "rank 2 failed: no space");
  EXPECT_EQ(errors[1], "rank 2 failed: no space");
}

void send_words(const Socket& socket, const std::string& words) {
  const FrameHeader header{FrameKind::kFailure, 0, 0, static_cast<int64_t>(words.size())};
  const Deadline deadline = Clock::now() + std::chrono::seconds(5);
  send_all(socket, &header, sizeof(header), deadline);
  send_all(socket, words.data(), words.size(), deadline);
}

void wait_for_end(const Socket& socket) {
  char byte = 0;
  while (receive_all(socket, &byte, 1, Clock::now() + std::chrono::seconds(10))) {
  }
}

// A rank that hears of a failure ends, and others see its connection close: together with the
// words, or before them.
TEST(TcpTransport, WordsAboutAFailureCountMoreThanAnEndBesideThem) {
  std::latch has_happened(2);
  const std::vector<std::string> errors = run_connected(3, [&](int rank, TcpMesh mesh) {
    if (rank == 1) send_words(mesh.sockets[2], "!rank 1 failed: no space");
    if (rank == 0) mesh.sockets.clear();
    if (rank < 2) {
      has_happened.count_down();
      if (rank == 1) wait_for_end(mesh.sockets[2]);
      return;
    }
    has_happened.wait();
    TcpTransport transport(rank, std::move(mesh));
    receive(transport, 1, 1, kSmallBytes);
  });
  EXPECT_EQ(errors[2], "rank 1 failed: no space");
}

TEST(TcpTransport, PassesOnWordsToThoseWhoHaveNotHeardThem) {
  const std::vector<std::string> errors = run_connected(3, [](int rank, TcpMesh mesh) {
    if (rank == 1) {
      send_words(mesh.sockets[0], "!rank 1 failed: no space");
      for (const int other : {0, 2}) wait_for_end(mesh.sockets[static_cast<size_t>(other)]);
      return;
    }
    TcpTransport transport(rank, std::move(mesh));
    receive(transport, 1, 1, kSmallBytes);
  });
  EXPECT_EQ(errors[0], "rank 1 failed: no space");
  EXPECT_EQ(errors[2], "rank 1 failed: no space");
}

// --- peers that are no ranks of ours, or have gone mad ---

void send_frame(const Socket& socket, const FrameHeader& header) {
  const std::vector<char> payload(static_cast<size_t>(std::max<int64_t>(header.frame_bytes, 0)),
                                  'x');
  const Deadline deadline = Clock::now() + std::chrono::seconds(5);
  // A peer that was hung up on cannot send any more.
  if (send_all(socket, &header, sizeof(header), deadline))
    send_all(socket, payload.data(), payload.size(), deadline);
}

// Rank 0's error while rank 1, a bare socket, sends the bytes of `misbehave`. Rank 0 waits for
// `bytes` on channel 1.
std::string error_beside(int64_t bytes, const std::function<void(const Socket&)>& misbehave) {
  const std::vector<std::string> errors = run_connected(2, [&](int rank, TcpMesh mesh) {
    if (rank == 1) {
      misbehave(mesh.sockets[0]);
      wait_for_end(mesh.sockets[0]);  // until rank 0 has hung up
      return;
    }
    TcpTransport transport(rank, std::move(mesh));
    receive(transport, 1, 1, bytes);
  });
  EXPECT_EQ(errors[1], "");
  return errors[0];
}

TEST(TcpTransport, HangsUpOnAPeerThatSendsMoreThanItMay) {
  const struct {
    const char* what;
    int64_t awaited_bytes;
    int num_frames;
    std::function<FrameHeader(int)> frame;
  } cases[] = {
      {"a byte beyond the buffer with every frame", 8, 11,
       [](int i) {
         return FrameHeader{FrameKind::kData, 1, 8, i == 0 ? 7 : 8};
       }},
      {"pieces beyond the message", kLargeBytes, static_cast<int>(kLargeBytes / 200'000) + 1,
       [](int) {
         return FrameHeader{FrameKind::kData, 1, kLargeBytes, 200'000};
       }},
      {"messages nobody asked for", kSmallBytes, 300,
       [](int) {
         return FrameHeader{FrameKind::kData, 2, TcpTransport::kEagerBytes,
                            TcpTransport::kEagerBytes};
       }},
      {"channels", kSmallBytes, 70'000,
       [](int i) {
         return FrameHeader{FrameKind::kAnnounce, i + 2, 5, 0};
       }},
      {"frames that make no sense", kLargeBytes, 1, nullptr}};
  const std::vector<FrameHeader> senseless = {
      {static_cast<FrameKind>(77), 1, 8, 0},
      {FrameKind::kData, 1, 8, 9},
      {FrameKind::kData, 1, -8, -8},
      {FrameKind::kData, -1, 8, 8},
      {FrameKind::kData, 1, INT64_MAX, TcpConnection::kMaxFrameBytes + 1},
      {FrameKind::kReady, 1, 8, 8},
      {FrameKind::kFailure, 0, 0, 4096}};
  for (const auto& [what, awaited_bytes, num_frames, frame] : cases)
    for (size_t round = 0; round < (frame ? 1 : senseless.size()); ++round)
      EXPECT_EQ(error_beside(awaited_bytes,
                             [&](const Socket& socket) {
                               for (int i = 0; i < num_frames; ++i)
                                 send_frame(socket, frame ? frame(i) : senseless[round]);
                             }),
                "rank 1 is gone: its connection carried something that is not of this program; "
                "look at what it said last")
          << what << " " << round;
}

TEST(TcpTransport, ShowsWordsOfAPeerWithoutControlCharacters) {
  const std::string words =
      "!rank 1 failed: \x1b[2J\x9b"
      "1mgone\nsecond line\x07";
  EXPECT_EQ(error_beside(kSmallBytes, [&](const Socket& socket) { send_words(socket, words); }),
            "rank 1 failed: \\x1b[2J\\x9b1mgone\nsecond line\\x07");
}

// A failed exchange releases the memory of a message in the middle; the address sanitizer watches.
TEST(TcpTransport, TakesItsBuffersBackWhenAnExchangeFails) {
  for (int round = 0; round < 4; ++round) {
    run_connected(2, [&](int rank, TcpMesh mesh) {
      TcpTransport transport(rank, std::move(mesh));
      std::atomic<int> num_begun{0};
      std::thread busy([&] {
        try {
          for (int i = 0; i < 100; ++i) {
            std::vector<char> own = pattern(kLargeBytes, i);
            std::vector<char> theirs(own.size());
            const Message out{1 - rank, own.data(), kLargeBytes};
            const Message in{1 - rank, theirs.data(), kLargeBytes};
            ++num_begun;
            num_begun.notify_all();
            transport.exchange(1, {&out, 1}, {&in, 1}, within(20));
          }
          ADD_FAILURE() << "nobody told of the failure";
        } catch (const AbortedError&) {
        }
      });
      for (int seen = 0; seen <= round; seen = num_begun) num_begun.wait(seen);
      if (rank == 0) transport.tell_everybody("enough", MessageTransport::Words::kFinal);
      busy.join();
    });
  }
}

}  // namespace
}  // namespace fsdp::tcp_transport_test
