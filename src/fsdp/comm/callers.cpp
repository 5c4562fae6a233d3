#include "fsdp/comm/callers.h"

#include <cerrno>
#include <cstring>
#include <utility>

#include "fsdp/base/log.h"
#include "fsdp/comm/comm_error.h"

namespace fsdp {

namespace {

// A rank greets back at once, from wherever it is.
constexpr std::chrono::seconds kPatience{5};

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

void Callers::hear(const std::function<void(Introduction caller, Socket socket)>& welcome) {
  accept();
  const auto oldest = std::chrono::steady_clock::now() - kPatience;
  std::vector<Handshake> known;
  std::erase_if(waiting_, [&](Handshake& caller) {
    const Handshake::State state = caller.advance();
    if (state == Handshake::State::kGoing) return caller.begin() < oldest;
    if (state == Handshake::State::kDone) known.push_back(std::move(caller));
    if (state == Handshake::State::kOtherKey && !std::exchange(has_warned_, true))
      log(LogLevel::kWarning, "somebody who says RANK=", caller.other().rank,
          " called and does not know this job's FSDP_SECRET, or belongs to another job");
    return true;
  });
  // A rank that is not welcome is an error: nobody is lost by it.
  for (Handshake& caller : known) welcome(caller.other(), caller.take_socket());
}

}  // namespace fsdp
