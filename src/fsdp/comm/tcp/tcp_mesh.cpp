#include "fsdp/comm/tcp/tcp_mesh.h"

#include <poll.h>
#include <sys/random.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <map>
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

constexpr uint64_t kMagic = 0x3270637470647366;  // "fsdptcp2", also tells the byte order

template <typename Bytes>
void fill_randomly(Bytes& bytes) {
  FSDP_CHECK(::getrandom(bytes.data(), bytes.size(), 0) == static_cast<ssize_t>(bytes.size()),
             "this host gives no random numbers: ", std::strerror(errno));
}

void append(std::vector<std::byte>& bytes, std::span<const std::byte> more) {
  bytes.insert(bytes.end(), more.begin(), more.end());
}

template <typename Field>
std::span<const std::byte> field_bytes(const Field& field) {
  return std::as_bytes(std::span(&field, 1));
}

// How long a caller may stay silent. A rank answers a greeting at once, wherever it runs.
constexpr std::chrono::seconds kPatienceWithCallers{5};

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

  std::vector<Socket> run() {
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
    return std::move(sockets_);
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
          throw_other_key(peer);
      if (Clock::now() >= next_word) {
        log(LogLevel::kWarning, "rank 0 waits for rank ", join(texts_of(missing), ", "),
            ", which has not joined; it will wait ", seconds_left(), " s more");
        next_word = Clock::now() + std::chrono::seconds(60);
      }
      for (const int peer : wait_and_hear(callers))
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
    if (state == Handshake::State::kOtherKey && !may_be_old()) throw_other_key(0);
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
    std::map<int, Handshake> calls;
    for (int peer = 1; peer < options_.rank; ++peer) calls.emplace(peer, call(peer));
    for (std::vector<int> missing = missing_from(1); !missing.empty(); missing = missing_from(1)) {
      if (Clock::now() >= deadline_) throw_late(missing, "has not answered");
      if (!wait_and_hear(*callers_, calls).empty()) hear_verdict({});
      for (auto entry = calls.begin(); entry != calls.end();)
        entry = is_answered(entry->first, entry->second) ? calls.erase(entry) : std::next(entry);
    }
    callers_.reset();
  }

  Handshake call(int peer) {
    const Endpoint endpoint = ranks_[static_cast<size_t>(peer)].endpoint();
    FSDP_CHECK(is_loopback(endpoint.host) == is_loopback(own().endpoint().host), "rank ", peer,
               " listens at ", shown(endpoint.host), " and rank ", options_.rank, " at ",
               own().endpoint().host,
               ", and one of them is seen on its own host only: set FSDP_HOST_ADDRESS on every "
               "host to its address in their network");
    Socket socket = start_connecting(endpoint);
    if (!socket) throw_unreachable(peer, errno);
    return Handshake::as_caller(std::move(socket), key_, own(), peer);
  }

  bool is_answered(int peer, Handshake& handshake) {
    switch (handshake.advance()) {
      case Handshake::State::kGoing:
        return false;
      case Handshake::State::kOtherKey:
        throw_other_key(peer);
      case Handshake::State::kClosed:
        // The rank that listened there has ended, or could never be reached.
        if (handshake.error_code() != 0 && handshake.error_code() != ECONNRESET)
          throw_unreachable(peer, handshake.error_code());
        handshake = call(peer);
        return false;
      case Handshake::State::kDone:
        socket_of(peer) = handshake.take_socket();
        return true;
    }
    return false;
  }

  // --- all ---

  // Waits until somebody says something, but not for long; returns the ranks that have hung up.
  // Rank 0 watches everybody, the others only rank 0, which will tell them.
  std::vector<int> wait_and_hear(Callers& callers, const std::map<int, Handshake>& calls = {}) {
    std::vector<pollfd> waiting;
    std::vector<int> peers;
    for (int peer = 0; peer < (options_.rank == 0 ? options_.size : 1); ++peer) {
      if (!socket_of(peer)) continue;
      waiting.push_back({socket_of(peer).fd(), POLLRDHUP, 0});
      peers.push_back(peer);
    }
    callers.add_to(waiting);
    for (const auto& [peer, handshake] : calls) waiting.push_back({handshake.fd(), POLLIN, 0});
    ::poll(waiting.data(), waiting.size(), /*milliseconds=*/100);
    callers.hear(
        [this](const Introduction& caller, Socket socket) { welcome(caller, std::move(socket)); });
    std::vector<int> gone;
    for (size_t i = 0; i < peers.size(); ++i)
      if (waiting[i].revents != 0) gone.push_back(peers[i]);
    return gone;
  }

  void welcome(const Introduction& caller, Socket socket) {
    if (caller.size != options_.size) throw_other_size(caller);
    if (caller.rank <= options_.rank || caller.rank >= options_.size)
      throw CommError(concat("a process with RANK=", caller.rank, " of WORLD_SIZE=", caller.size,
                             " called rank ", options_.rank,
                             ": every process of a job needs its own RANK below WORLD_SIZE"));
    if (socket_of(caller.rank))
      throw CommError(
          concat("two processes say RANK=", caller.rank, ": every process of a job needs its own"));
    ranks_[static_cast<size_t>(caller.rank)] = caller;
    socket_of(caller.rank) = std::move(socket);
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

  [[noreturn]] void throw_other_key(int peer) const {
    throw CommError(concat("rank ", peer, " and rank ", options_.rank,
                           " have not the same FSDP_SECRET, or are of different jobs: start all "
                           "processes of a job with the same"));
  }

  [[noreturn]] void throw_unreachable(int peer, int code) const {
    throw CommError(concat("rank ", options_.rank, " cannot reach rank ", peer, " at ",
                           shown(ranks_[static_cast<size_t>(peer)].endpoint().text()), ": ",
                           std::strerror(code), "; look at what it said last, or set ",
                           "FSDP_HOST_ADDRESS on its host to an address that others reach"));
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
  std::string where_rank_0_is_ = "said where it listens";
};

}  // namespace

Digest job_key(const std::string& secret, const std::string& meeting) {
  return hmac_sha256(std::as_bytes(std::span(secret)), std::as_bytes(std::span(meeting)));
}

Endpoint Introduction::endpoint() const {
  return {std::string(host.data(), ::strnlen(host.data(), host.size())), port};
}

void Introduction::set_endpoint(const Endpoint& endpoint) {
  FSDP_CHECK(endpoint.host.size() < host.size(), "address '", endpoint.host, "' is too long");
  host = {};
  std::copy(endpoint.host.begin(), endpoint.host.end(), host.begin());
  port = endpoint.port;
}

Handshake::Handshake(Socket socket, const Digest& key, const Introduction& own, int callee)
    : socket_(std::move(socket)),
      key_(key),
      own_(own),
      callee_(callee),
      step_(is_called() ? &Handshake::greet : &Handshake::hear_greeting) {
  prepare_for_messages(socket_);
}

Handshake Handshake::as_called(Socket socket, const Digest& key, const Introduction& own) {
  return Handshake(std::move(socket), key, own, -1);
}

Handshake Handshake::as_caller(Socket socket, const Digest& key, const Introduction& own,
                               int callee) {
  return Handshake(std::move(socket), key, own, callee);
}

Handshake::State Handshake::advance() {
  State state = State::kDone;
  while (state == State::kDone && step_ != nullptr) state = (this->*step_)();
  return state;
}

Handshake::State Handshake::greet() {
  greeting_.magic = kMagic;
  fill_randomly(greeting_.nonce);
  step_ = &Handshake::hear_call;
  return send(&greeting_, sizeof(greeting_));
}

Handshake::State Handshake::hear_greeting() {
  const State state = receive(&greeting_, sizeof(greeting_));
  if (state != State::kDone) return state;
  if (greeting_.magic != kMagic) return State::kClosed;
  call_.magic = kMagic;
  fill_randomly(call_.nonce);
  call_.caller = own_;
  call_.callee = callee_;
  call_.code = code_of_call();
  step_ = &Handshake::hear_answer;
  return send(&call_, sizeof(call_));
}

Handshake::State Handshake::hear_call() {
  const State state = receive(&call_, sizeof(call_));
  if (state != State::kDone) return state;
  if (call_.magic != kMagic) return State::kClosed;
  other_ = call_.caller;
  const bool knows_key = is_same(call_.code, code_of_call());
  if (knows_key && call_.callee != own_.rank) return State::kClosed;
  answer_.knows_key = knows_key ? 1 : 0;
  // A stranger learns nothing that is made with the key.
  if (knows_key) {
    answer_.callee = own_;
    answer_.code = code_of_answer();
  }
  step_ = nullptr;
  const State sent = send(&answer_, sizeof(answer_));
  return knows_key ? sent : State::kOtherKey;
}

Handshake::State Handshake::hear_answer() {
  const State state = receive(&answer_, sizeof(answer_));
  if (state != State::kDone) return state;
  step_ = nullptr;
  if (answer_.knows_key == 0 || !is_same(answer_.code, code_of_answer())) return State::kOtherKey;
  other_ = answer_.callee;
  return other_.rank == callee_ ? State::kDone : State::kClosed;
}

Handshake::State Handshake::receive(void* message, size_t bytes) {
  while (received_ < bytes) {
    const ssize_t count =
        ::recv(socket_.fd(), static_cast<char*>(message) + received_, bytes - received_, 0);
    if (count < 0 && errno == EINTR) continue;
    // A socket that is still being connected says ENOTCONN.
    if (count < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == ENOTCONN))
      return State::kGoing;
    if (count <= 0) {
      error_code_ = count < 0 ? errno : 0;
      return State::kClosed;
    }
    received_ += static_cast<size_t>(count);
  }
  received_ = 0;
  return State::kDone;
}

// These few bytes always fit into the buffer of a new socket.
Handshake::State Handshake::send(const void* message, size_t bytes) {
  const ssize_t sent = ::send(socket_.fd(), message, bytes, MSG_NOSIGNAL);
  if (sent == static_cast<ssize_t>(bytes)) return State::kDone;
  error_code_ = sent < 0 ? errno : 0;
  return State::kClosed;
}

Digest Handshake::code_of_call() const {
  std::vector<std::byte> bytes;
  append(bytes, std::as_bytes(std::span(std::string_view("call"))));
  append(bytes, greeting_.nonce);
  append(bytes, call_.nonce);
  append(bytes, field_bytes(call_.caller));
  append(bytes, field_bytes(call_.callee));
  return hmac_sha256(key_, bytes);
}

Digest Handshake::code_of_answer() const {
  std::vector<std::byte> bytes;
  append(bytes, std::as_bytes(std::span(std::string_view("answer"))));
  append(bytes, call_.code);  // covers all that was said before
  append(bytes, field_bytes(answer_.callee));
  return hmac_sha256(key_, bytes);
}

Callers::Callers(Socket listener, const Digest& key, const Introduction& own, size_t max_waiting)
    : listener_(std::move(listener)), key_(key), own_(own), max_waiting_(max_waiting) {}

void Callers::add_to(std::vector<pollfd>& waiting) const {
  waiting.push_back({listener_.fd(), POLLIN, 0});
  for (const Handshake& caller : waiting_) waiting.push_back({caller.fd(), POLLIN, 0});
}

void Callers::accept() {
  for (size_t count = 0; count < max_waiting_; ++count) {
    Socket socket = try_accept(listener_);
    if (!socket) {
      if (errno == EMFILE || errno == ENFILE)
        throw CommError(concat("rank ", own_.rank, " cannot hold a connection to every rank: ",
                               std::strerror(errno), "; raise ulimit -n above ", own_.size + 200));
      return;
    }
    if (waiting_.size() >= max_waiting_) waiting_.erase(waiting_.begin());
    waiting_.push_back(Handshake::as_called(std::move(socket), key_, own_));
  }
}

void Callers::hear(const std::function<void(Introduction caller, Socket socket)>& welcome) {
  accept();
  const auto oldest = std::chrono::steady_clock::now() - kPatienceWithCallers;
  std::vector<Handshake> known;
  std::erase_if(waiting_, [&](Handshake& caller) {
    const Handshake::State state = caller.advance();
    if (state == Handshake::State::kGoing) return caller.begin() < oldest;
    if (state == Handshake::State::kDone) known.push_back(std::move(caller));
    if (state == Handshake::State::kOtherKey) note_refused(caller.other());
    return true;
  });
  // `welcome` may throw, which loses the callers after this one; but it throws only for an error
  // that ends the whole meeting.
  for (Handshake& caller : known) welcome(caller.other(), caller.take_socket());
}

void Callers::note_refused(const Introduction& stranger) {
  if (refused_.size() >= max_waiting_) return;
  if (refused_.empty())
    log(LogLevel::kWarning, "somebody who says RANK=", stranger.rank,
        " called and does not know this job's FSDP_SECRET, or belongs to another job");
  refused_.try_emplace({stranger.rank, stranger.size}, std::chrono::steady_clock::now());
}

bool Callers::has_refused(int rank, int size, double seconds_ago) const {
  const auto found = refused_.find({rank, size});
  return found != refused_.end() && std::chrono::steady_clock::now() - found->second >=
                                        std::chrono::duration<double>(seconds_ago);
}

std::vector<Socket> connect_tcp_mesh(MeetingPlace& place, const TcpMeshOptions& options) {
  return TcpMeeting(place, options).run();
}

}  // namespace fsdp
