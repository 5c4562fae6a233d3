#include "fsdp/comm/tcp/tcp_mesh.h"

#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <chrono>
#include <optional>
#include <span>
#include <string_view>
#include <thread>
#include <utility>

#include "fsdp/base/check.h"
#include "fsdp/base/log.h"
#include "fsdp/base/text.h"
#include "fsdp/comm/comm_error.h"

namespace fsdp {

namespace {

using Clock = std::chrono::steady_clock;

// The message of rank 0 to the others. Behind it follow: the ranks' introductions when all have
// come, nothing when all are connected, or the text of an error when that has failed.
struct Verdict {
  int32_t has_failed = 0;
  int32_t bytes = 0;
};
constexpr int32_t kMaxVerdictBytes = 2048;

// How long a called rank may take for a handshake before it is called again.
constexpr std::chrono::seconds kPatienceWithCalled{10};
// Rank 0's deadline comes first: it knows who is missing, and tells the others.
constexpr std::chrono::seconds kMomentForVerdict{2};
// Strangers that may be heard beside the ranks.
constexpr size_t kMaxStrangers = 64;

class TcpMeeting {
 public:
  TcpMeeting(MeetingPlace& place, const TcpMeshOptions& options)
      : place_(place),
        options_(options),
        key_(job_key(options.secret, options.meeting)),
        begin_(Clock::now()),
        deadline_(begin_ + std::chrono::ceil<Clock::duration>(
                               std::chrono::duration<double>(options.timeout_seconds))),
        ranks_(static_cast<size_t>(options.size)),
        sockets_(static_cast<size_t>(options.size)) {
    own().rank = options.rank;
    own().size = options.size;
  }

  TcpMesh run() {
    if (options_.rank == 0) {
      gather_all();
    } else {
      join_rank_0();
      hear_verdict(std::as_writable_bytes(std::span(ranks_)));
      connect_others();
      const char has_met = 1;
      if (!send_all(socket_of(0), &has_met, 1, deadline_)) throw_lost();
      hear_verdict({});
    }
    return {std::move(sockets_), std::move(calls_)};
  }

 private:
  Introduction& own() { return ranks_[static_cast<size_t>(options_.rank)]; }
  Socket& socket_of(int peer) { return sockets_[static_cast<size_t>(peer)]; }

  Callers listen_at_own() {
    Socket listener = listen_at(options_.listen);
    own().set_endpoint(endpoint_of(listener));
    return Callers(std::move(listener), key_, own(),
                   static_cast<size_t>(options_.size) + kMaxStrangers);
  }

  // --- rank 0 ---

  void gather_all() {
    try {
      gather();
      tell_everybody(/*has_failed=*/0, {reinterpret_cast<const char*>(ranks_.data()),
                                        ranks_.size() * sizeof(Introduction)});
      wait_until_all_have_met();
      tell_everybody(/*has_failed=*/0, {});
    } catch (const CommError& error) {
      tell_everybody(/*has_failed=*/1, std::string(error.what()).substr(0, kMaxVerdictBytes));
      throw;
    }
  }

  void gather() {
    Callers callers = listen_at_own();
    place_.announce(own().endpoint());
    auto next_word = begin_ + std::chrono::seconds(10);
    for (std::vector<int> missing = missing_from(1); !missing.empty(); missing = missing_from(1)) {
      if (Clock::now() >= deadline_) throw_late(missing, "has not joined");
      for (const int peer : missing)
        if (callers.has_refused(peer, options_.size, options_.seconds_for_strangers))
          throw other_key_error(peer, options_.rank);
      if (Clock::now() >= next_word) {
        log(LogLevel::kWarning, "rank 0 waits for rank ", join(texts_of(missing), ", "),
            ", which has not joined; it will wait ", seconds_left(), " s more");
        next_word = Clock::now() + std::chrono::seconds(60);
      }
      const std::vector<int> gone = wait_for_words(callers);
      callers.hear(welcome_);
      for (const int peer : gone)
        throw CommError(concat("rank ", peer, " left before all ranks had joined; look at what it ",
                               "said last"));
    }
  }

  // Each rank says with one byte that it is connected to all. No rank closes its connection before,
  // so a connection that ends until then belongs to a rank that has failed.
  void wait_until_all_have_met() {
    std::vector<int> missing;
    for (int peer = 1; peer < options_.size; ++peer) missing.push_back(peer);
    while (!missing.empty()) {
      if (Clock::now() >= deadline_) throw_late(missing, "has not met all others");
      std::vector<pollfd> waiting;
      for (const int peer : missing) waiting.push_back({socket_of(peer).fd(), POLLIN, 0});
      ::poll(waiting.data(), waiting.size(), /*milliseconds=*/100);
      std::erase_if(missing, [this](int peer) {
        char has_met = 0;
        const ssize_t bytes = ::recv(socket_of(peer).fd(), &has_met, 1, 0);
        if (bytes < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR)) return false;
        if (bytes > 0) return true;
        throw CommError(
            concat("rank ", peer, " left before all ranks had met; look at what it ", "said last"));
      });
    }
  }

  void tell_everybody(int32_t has_failed, std::string_view words) {
    const Verdict verdict{has_failed, static_cast<int32_t>(words.size())};
    for (Socket& socket : sockets_) {
      if (!socket) continue;
      // A rank that does not take the verdict is gone; the ranks that need it will find that out.
      const Deadline soon = Clock::now() + kPatienceWithCalled;
      if (send_all(socket, &verdict, sizeof(verdict), soon))
        send_all(socket, words.data(), words.size(), soon);
    }
  }

  // --- the others ---

  void join_rank_0() {
    while (!call_rank_0()) {
      if (Clock::now() >= deadline_)
        throw TimeoutError(concat("rank 0 has not ", where_rank_0_is_, " after ",
                                  options_.timeout_seconds, " s: look at what it does, or correct ",
                                  "MASTER_ADDR and MASTER_PORT"));
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
    }
  }

  // False: rank 0 does not listen there yet, or somebody else does.
  bool call_rank_0() {
    const std::optional<Endpoint> endpoint = place_.find();
    if (!endpoint) return false;
    where_rank_0_is_ = concat("answered at ", endpoint->text());
    Socket socket = try_connect(*endpoint, std::min(deadline_, Clock::now() + kPatienceWithCalled));
    if (!socket) return false;
    if (!callers_) {
      if (options_.listen.host.empty()) options_.listen.host = endpoint_of(socket).host;
      callers_.emplace(listen_at_own());
    }
    Handshake handshake = Handshake::as_caller(std::move(socket), key_, own(), 0);
    const Deadline patience = std::min(deadline_, Clock::now() + kPatienceWithCalled);
    Handshake::State state = Handshake::State::kGoing;
    while ((state = handshake.advance()) == Handshake::State::kGoing && Clock::now() < patience) {
      pollfd waiting{handshake.fd(), POLLIN, 0};
      ::poll(&waiting, 1, /*milliseconds=*/100);
    }
    if (state == Handshake::State::kOtherKey && !may_be_old())
      throw other_key_error(0, options_.rank);
    if (state != Handshake::State::kDone) return false;
    if (handshake.other().size != options_.size) {
      if (!may_be_old()) throw_other_size(handshake.other());
      return false;
    }
    socket_of(0) = handshake.take_socket();
    return true;
  }

  bool may_be_old() const {
    return Clock::now() - begin_ < std::chrono::duration<double>(options_.seconds_for_old_entries);
  }

  // Fills `answer`; an Error with rank 0's words when the meeting has failed.
  void hear_verdict(std::span<std::byte> answer) {
    const Deadline deadline = deadline_ + kMomentForVerdict;
    Verdict verdict;
    if (!receive_all(socket_of(0), &verdict, sizeof(verdict), deadline)) throw_lost();
    if (verdict.has_failed != 0) {
      std::string text(static_cast<size_t>(std::clamp(verdict.bytes, 0, kMaxVerdictBytes)), ' ');
      if (!receive_all(socket_of(0), text.data(), text.size(), deadline)) throw_lost();
      throw AbortedError(shown(text, kMaxVerdictBytes));
    }
    if (verdict.bytes != static_cast<int32_t>(answer.size()) ||
        !receive_all(socket_of(0), answer.data(), answer.size(), deadline))
      throw_lost();
  }

  // Calls all below and hears all above at once.
  void connect_others() {
    calls_ = std::make_unique<RankCalls>(ranks_, options_.rank, key_, *std::move(callers_));
    callers_.reset();
    if (options_.size > options_.max_meshed_ranks) return;
    for (int peer = 1; peer < options_.rank; ++peer) calls_->call(peer);
    for (std::vector<int> missing = missing_from(1); !missing.empty(); missing = missing_from(1)) {
      if (Clock::now() >= deadline_) throw_late(missing, "has not answered");
      const std::vector<int> gone = wait_for_words(*calls_);
      calls_->advance(welcome_);
      if (!gone.empty()) hear_verdict({});
    }
    calls_.reset();
  }

  // --- all ---

  // Waits until somebody says something, but not for long; returns the ranks that have hung up.
  // Rank 0 watches everybody, the others only rank 0, which will tell them.
  template <typename Others>
  std::vector<int> wait_for_words(const Others& others) {
    std::vector<pollfd> waiting;
    std::vector<int> peers;
    for (int peer = 0; peer < (options_.rank == 0 ? options_.size : 1); ++peer) {
      if (!socket_of(peer)) continue;
      waiting.push_back({socket_of(peer).fd(), POLLRDHUP, 0});
      peers.push_back(peer);
    }
    others.add_to(waiting);
    ::poll(waiting.data(), waiting.size(), /*milliseconds=*/100);
    std::vector<int> gone;
    for (size_t i = 0; i < peers.size(); ++i)
      if (waiting[i].revents != 0) gone.push_back(peers[i]);
    return gone;
  }

  void welcome(const Introduction& other, Socket socket) {
    if (other.size != options_.size) throw_other_size(other);
    if (socket_of(other.rank))
      throw CommError(
          concat("two processes say RANK=", other.rank, ": every process of a job needs its own"));
    ranks_[static_cast<size_t>(other.rank)] = other;
    socket_of(other.rank) = std::move(socket);
  }

  std::vector<int> missing_from(int first) {
    std::vector<int> missing;
    for (int peer = first; peer < options_.size; ++peer)
      if (peer != options_.rank && !socket_of(peer)) missing.push_back(peer);
    return missing;
  }

  static std::vector<std::string> texts_of(const std::vector<int>& ranks) {
    std::vector<std::string> texts;
    for (const int rank : ranks) texts.push_back(std::to_string(rank));
    return texts;
  }

  int64_t seconds_left() const {
    return std::chrono::round<std::chrono::seconds>(deadline_ - Clock::now()).count();
  }

  [[noreturn]] void throw_other_size(const Introduction& other) const {
    throw CommError(concat("rank ", other.rank, " says WORLD_SIZE=", other.size, ", but rank ",
                           options_.rank, " says WORLD_SIZE=", options_.size,
                           ": start all processes of a job with the same number"));
  }

  [[noreturn]] void throw_lost() const {
    if (Clock::now() >= deadline_) throw_late({0}, "has not said where the others are");
    throw AbortedError(
        "rank 0 is gone: it ended before all ranks had met; look at what it said "
        "last");
  }

  [[noreturn]] void throw_late(const std::vector<int>& ranks, const std::string& what) const {
    throw TimeoutError(concat("rank ", options_.rank, " of ", options_.size, " waited ",
                              options_.timeout_seconds, " s for rank ", join(texts_of(ranks), ", "),
                              ", which ", what, ": look at what it says, or raise ",
                              options_.timeout_name));
  }

  MeetingPlace& place_;
  TcpMeshOptions options_;
  const Digest key_;
  const Clock::time_point begin_;
  const Deadline deadline_;
  std::vector<Introduction> ranks_;
  std::vector<Socket> sockets_;
  std::optional<Callers> callers_;  // not on rank 0, which listens only while it gathers the ranks
  std::unique_ptr<RankCalls> calls_;
  const Welcome welcome_ = [this](const Introduction& other, Socket socket) {
    welcome(other, std::move(socket));
  };
  std::string where_rank_0_is_ = "said where it listens";
};

}  // namespace

TcpMesh connect_tcp_mesh(MeetingPlace& place, const TcpMeshOptions& options) {
  return TcpMeeting(place, options).run();
}

}  // namespace fsdp
