#include "fsdp/comm/tcp_mesh.h"

#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <optional>
#include <random>
#include <sstream>
#include <thread>
#include <utility>

#include "fsdp/comm/comm_error.h"

namespace fsdp {

namespace {

using Clock = std::chrono::steady_clock;

// What a rank publishes: "3 10.0.0.1 40123 6148914691236517205".
struct Entry {
  int size = 0;
  Endpoint endpoint;
  uint64_t token = 0;

  std::string text() const {
    return concat(size, " ", endpoint.host, " ", endpoint.port, " ", token);
  }

  static std::optional<Entry> parse(const std::string& text) {
    Entry entry;
    std::istringstream in(text);
    in >> entry.size >> entry.endpoint.host >> entry.endpoint.port >> entry.token;
    return in ? std::optional(entry) : std::nullopt;
  }
};

// The first bytes on a connection, both ways. The token is the called rank's: whoever knows it has
// read the job's store.
struct Hello {
  static constexpr uint64_t kMagic = 0x3170637470647366;  // "fsdptcp1", also tells the byte order

  uint64_t magic = kMagic;
  uint64_t token = 0;
  int32_t rank = 0;
  int32_t size = 0;
};

uint64_t random_token() {
  std::random_device source;
  return (uint64_t{source()} << 32) | source();
}

class Meeting {
 public:
  Meeting(MeetingStore& store, const TcpMeshOptions& options)
      : store_(store),
        options_(options),
        begin_(Clock::now()),
        deadline_(begin_ + std::chrono::ceil<Clock::duration>(
                               std::chrono::duration<double>(options.timeout_seconds))),
        listener_(listen_at(options.address, options.size)),
        own_{options.size, endpoint_of(listener_), random_token()},
        sockets_(static_cast<size_t>(options.size)) {}

  std::vector<Socket> run() {
    store_.publish(key_of(options_.rank), own_.text());
    for (int peer = 0; peer < options_.rank; ++peer) call(peer);
    accept_callers();
    // An old entry's port may belong to another program by now, which has hung up.
    for (int peer = 0; peer < options_.rank; ++peer)
      while (!hear_reply(peer)) call(peer);
    for (int peer = 0; peer < options_.size; ++peer)
      if (peer != options_.rank) prepare_for_messages(socket_of(peer));
    return std::move(sockets_);
  }

 private:
  struct Caller {
    Socket socket;
    Hello hello;
    size_t received = 0;
  };

  std::string key_of(int peer) const { return concat(options_.prefix, peer); }
  Socket& socket_of(int peer) { return sockets_[static_cast<size_t>(peer)]; }

  bool may_be_old() const {
    return Clock::now() - begin_ < std::chrono::duration<double>(options_.seconds_for_old_entries);
  }

  // Asks the store until the peer's entry is there and somebody answers; greets him.
  void call(int peer) {
    while (true) {
      const std::optional<std::string> text = store_.find(key_of(peer));
      const std::optional<Entry> entry = text ? Entry::parse(*text) : std::nullopt;
      if (entry && agrees(peer, *entry)) {
        const Hello hello{.token = entry->token, .rank = options_.rank, .size = options_.size};
        Socket socket = try_connect(entry->endpoint, deadline_);
        if (socket && send_all(socket, &hello, sizeof(hello), deadline_)) {
          tokens_.resize(sockets_.size());
          tokens_[static_cast<size_t>(peer)] = entry->token;
          socket_of(peer) = std::move(socket);
          return;
        }
      }
      if (Clock::now() >= deadline_) {
        const std::string where = entry ? concat(" at ", entry->endpoint.text()) : "";
        throw_late({std::to_string(peer)},
                   entry ? concat("has not answered", where) : std::string("has not joined"));
      }
      std::this_thread::sleep_for(std::chrono::milliseconds(entry ? 50 : 5));
    }
  }

  bool agrees(int peer, const Entry& entry) const {
    if (entry.size == options_.size) return check_reachable(peer, entry);
    if (!may_be_old()) throw_other_size(peer, entry.size);
    return false;
  }

  bool check_reachable(int peer, const Entry& entry) const {
    FSDP_CHECK(is_loopback(entry.endpoint.host) == is_loopback(own_.endpoint.host), "rank ", peer,
               " listens at ", entry.endpoint.host, " and rank ", options_.rank, " at ",
               own_.endpoint.host,
               ", and one of them is seen on its own host only: set FSDP_HOST_ADDRESS on every "
               "host to its address in their network");
    return true;
  }

  bool hear_reply(int peer) {
    Hello reply;
    if (!receive_all(socket_of(peer), &reply, sizeof(reply), deadline_)) {
      if (Clock::now() >= deadline_) throw_late({std::to_string(peer)}, "has not answered");
      std::this_thread::sleep_for(std::chrono::milliseconds(50));
      return false;
    }
    return reply.magic == Hello::kMagic && reply.rank == peer &&
           reply.token == tokens_[static_cast<size_t>(peer)];
  }

  // Strangers (port scanners, old processes) are not waited for: all callers are heard at once.
  void accept_callers() {
    std::vector<Caller> callers;
    while (true) {
      const std::vector<std::string> missing = missing_callers();
      if (missing.empty()) return;
      if (Clock::now() >= deadline_) throw_late(missing, "has not joined");
      std::vector<pollfd> waiting = {{listener_.fd(), POLLIN, 0}};
      for (const Caller& caller : callers) waiting.push_back({caller.socket.fd(), POLLIN, 0});
      if (::poll(waiting.data(), waiting.size(), /*milliseconds=*/100) == 0) check_sizes();
      while (Socket socket = try_accept(listener_)) callers.push_back({std::move(socket), {}, 0});
      std::erase_if(callers, [this](Caller& caller) { return is_finished(caller); });
    }
  }

  // Who believes in another size may never call.
  void check_sizes() {
    for (int peer = options_.rank + 1; peer < options_.size; ++peer) {
      if (socket_of(peer)) continue;
      const std::optional<std::string> text = store_.find(key_of(peer));
      const std::optional<Entry> entry = text ? Entry::parse(*text) : std::nullopt;
      if (entry) agrees(peer, *entry);
    }
  }

  std::vector<std::string> missing_callers() {
    std::vector<std::string> missing;
    for (int peer = options_.rank + 1; peer < options_.size; ++peer)
      if (!socket_of(peer)) missing.push_back(std::to_string(peer));
    return missing;
  }

  // Takes what the caller has said so far; true when there is no more to hear, whoever it was.
  bool is_finished(Caller& caller);
  void welcome(Caller& caller);

  [[noreturn]] void throw_other_size(int peer, int size) const {
    throw CommError(concat("rank ", peer, " says WORLD_SIZE=", size, ", but rank ", options_.rank,
                           " says WORLD_SIZE=", options_.size,
                           ": start all processes of a job with the same number"));
  }

  [[noreturn]] void throw_late(const std::vector<std::string>& ranks, const std::string& what) {
    throw TimeoutError(concat("rank ", options_.rank, " of ", options_.size, " waited ",
                              options_.timeout_seconds, " s for rank ", join(ranks, ", "),
                              ", which ", what, ": look at what it says, or raise ",
                              options_.timeout_name));
  }

  MeetingStore& store_;
  const TcpMeshOptions options_;
  const Clock::time_point begin_;
  const Deadline deadline_;
  const Socket listener_;
  const Entry own_;
  std::vector<Socket> sockets_;
  std::vector<uint64_t> tokens_;  // of those whom this rank called
};

bool Meeting::is_finished(Caller& caller) {
  char* place = reinterpret_cast<char*>(&caller.hello);
  while (caller.received < sizeof(Hello)) {
    const ssize_t bytes =
        ::recv(caller.socket.fd(), place + caller.received, sizeof(Hello) - caller.received, 0);
    if (bytes < 0 && errno == EINTR) continue;
    if (bytes < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return false;
    if (bytes <= 0) return true;
    caller.received += static_cast<size_t>(bytes);
  }
  if (caller.hello.magic == Hello::kMagic && caller.hello.token == own_.token) welcome(caller);
  return true;
}

void Meeting::welcome(Caller& caller) {
  const Hello& hello = caller.hello;
  if (hello.size != options_.size) throw_other_size(hello.rank, hello.size);
  FSDP_CHECK(hello.rank > options_.rank && hello.rank < options_.size,
             "a process with RANK=", hello.rank, " of WORLD_SIZE=", hello.size, " called rank ",
             options_.rank, ": every process of a job needs its own RANK below WORLD_SIZE");
  FSDP_CHECK(!socket_of(hello.rank), "two processes say RANK=", hello.rank,
             ": every process of a job needs its own");
  const Hello reply{.token = own_.token, .rank = options_.rank, .size = options_.size};
  if (!send_all(caller.socket, &reply, sizeof(reply), deadline_)) return;
  socket_of(hello.rank) = std::move(caller.socket);
}

}  // namespace

std::vector<Socket> connect_tcp_mesh(MeetingStore& store, const TcpMeshOptions& options) {
  return Meeting(store, options).run();
}

}  // namespace fsdp
