#include "fsdp/comm/tcp/rank_calls.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <iterator>

#include "fsdp/base/check.h"
#include "fsdp/base/log.h"
#include "fsdp/base/text.h"
#include "fsdp/comm/comm_error.h"

namespace fsdp {

namespace {

// How long a caller may stay silent. A rank answers a greeting at once, wherever it runs.
constexpr std::chrono::seconds kPatienceWithCallers{5};

CommError unreachable_error(const Introduction& peer, int own, int code) {
  return CommError(concat("rank ", own, " cannot reach rank ", peer.rank, " at ",
                          shown(peer.endpoint().text()), ": ", std::strerror(code),
                          "; look at what it said last, or set FSDP_HOST_ADDRESS on its host to an "
                          "address that others reach"));
}

}  // namespace

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

void Callers::hear(const Welcome& welcome) {
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
  for (Handshake& caller : known) {
    const Introduction& other = caller.other();
    if (other.size == own_.size && (other.rank <= own_.rank || other.rank >= own_.size))
      throw CommError(concat("a process with RANK=", other.rank, " of WORLD_SIZE=", other.size,
                             " called rank ", own_.rank,
                             ": every process of a job needs its own RANK below WORLD_SIZE"));
    welcome(other, caller.take_socket());
  }
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

RankCalls::RankCalls(std::vector<Introduction> ranks, int own, const Digest& key, Callers callers)
    : ranks_(std::move(ranks)), own_(own), key_(key), callers_(std::move(callers)) {}

void RankCalls::call(int peer) {
  if (!calls_.contains(peer)) calls_.emplace(peer, begin(peer));
}

Handshake RankCalls::begin(int peer) const {
  const Introduction& other = ranks_[static_cast<size_t>(peer)];
  const Introduction& own = ranks_[static_cast<size_t>(own_)];
  const Endpoint endpoint = other.endpoint();
  FSDP_CHECK(is_loopback(endpoint.host) == is_loopback(own.endpoint().host), "rank ", peer,
             " listens at ", shown(endpoint.host), " and rank ", own_, " at ", own.endpoint().host,
             ", and one of them is seen on its own host only: set FSDP_HOST_ADDRESS on every "
             "host to its address in their network");
  Socket socket = start_connecting(endpoint);
  if (!socket) throw unreachable_error(other, own_, errno);
  return Handshake::as_caller(std::move(socket), key_, own, peer);
}

void RankCalls::add_to(std::vector<pollfd>& waiting) const {
  callers_.add_to(waiting);
  for (const auto& [peer, handshake] : calls_) waiting.push_back({handshake.fd(), POLLIN, 0});
}

void RankCalls::advance(const Welcome& welcome) {
  callers_.hear(welcome);
  for (auto entry = calls_.begin(); entry != calls_.end();)
    entry =
        is_answered(entry->first, entry->second, welcome) ? calls_.erase(entry) : std::next(entry);
}

bool RankCalls::is_answered(int peer, Handshake& handshake, const Welcome& welcome) {
  switch (handshake.advance()) {
    case Handshake::State::kGoing:
      return false;
    case Handshake::State::kOtherKey:
      throw other_key_error(peer, own_);
    case Handshake::State::kClosed:
      // The rank that listened there has ended, or could never be reached.
      if (handshake.error_code() != 0 && handshake.error_code() != ECONNRESET)
        throw unreachable_error(ranks_[static_cast<size_t>(peer)], own_, handshake.error_code());
      handshake = begin(peer);
      return false;
    case Handshake::State::kDone:
      welcome(handshake.other(), handshake.take_socket());
      return true;
  }
  return false;
}

}  // namespace fsdp
