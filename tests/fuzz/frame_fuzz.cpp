// libFuzzer: for any bytes of a peer, a TCP transport receives its message or throws an Error,
// keeps within its memory, and stops waiting when the peer closes the connection.
#include <sys/socket.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "fsdp/base/error.h"
#include "fsdp/comm/tcp/tcp_transport.h"

namespace {

void require(bool condition, std::string_view problem) {
  if (condition) return;
  std::fprintf(stderr, "frame_fuzz: %.*s\n", static_cast<int>(problem.size()), problem.data());
  std::abort();
}

// Five bytes of the input choose a frame among those that are right, nearly right or wrong: so most
// inputs get past the first one.
void append_frame(std::vector<char>& stream, std::span<const uint8_t>& input) {
  constexpr int64_t kSizes[] = {0,      1,      7,       8,       9,         100,
                                65'536, 65'537, 262'144, 262'145, INT64_MAX, -1};
  const auto next = [&]() -> uint8_t {
    if (input.empty()) return 0;
    const uint8_t byte = input.front();
    input = input.subspan(1);
    return byte;
  };
  fsdp::FrameHeader header;
  header.kind = static_cast<fsdp::FrameKind>(next() % 8);
  header.channel = static_cast<int8_t>(next());
  header.message_bytes = kSizes[next() % std::size(kSizes)];
  header.frame_bytes = kSizes[next() % std::size(kSizes)];
  const auto payload = static_cast<size_t>(kSizes[next() % 10]);  // as announced, or not
  stream.insert(stream.end(), reinterpret_cast<const char*>(&header),
                reinterpret_cast<const char*>(&header) + sizeof(header));
  stream.insert(stream.end(), payload, '!');  // of a failure: no more words will follow
}

}  // namespace

// The first byte chooses what rank 0 waits for, and whether the rest is frames or raw bytes.
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size < 2) return 0;
  constexpr int64_t kWanted[] = {1, 8, 9, 65'536, 65'537, 300'000};
  const int64_t wanted = kWanted[data[0] % std::size(kWanted)];
  std::span<const uint8_t> input(data + 1, size - 1);
  std::vector<char> stream;
  if (data[0] >= 128)
    stream.assign(input.begin(), input.end());
  else
    while (!input.empty() && stream.size() < 200'000) append_frame(stream, input);

  int ends[2];
  require(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, ends) == 0, "no sockets");
  std::vector<fsdp::Socket> sockets(2);
  sockets[1] = fsdp::Socket(ends[0]);
  fsdp::Socket peer(ends[1]);
  {
    fsdp::TcpTransport transport(0, {.sockets = std::move(sockets), .calls = nullptr});
    // Sends as much as the socket takes, then the peer is gone.
    require(::send(peer.fd(), stream.data(), stream.size(), MSG_NOSIGNAL) != 0, "nothing sent");
    peer.close();
    std::vector<char> place(static_cast<size_t>(wanted));
    const fsdp::Message message{1, place.data(), wanted};
    try {
      transport.exchange(1, {}, {&message, 1}, {.what = "this", .timeout_seconds = 5});
    } catch (const fsdp::TimeoutError& error) {
      require(false, "it waits for a peer that has gone");
    } catch (const fsdp::Error&) {
    }
  }
  return 0;
}
