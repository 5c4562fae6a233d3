// How the processes of a job become connected by TCP, each with each; the handshake by which two
// ranks prove that they know the job's key; and the socket at which ranks, and strangers, call.
#pragma once

#include <poll.h>

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "fsdp/base/hmac_sha256.h"
#include "fsdp/comm/tcp/tcp_connection.h"

namespace fsdp {

// A key for one meeting of one job: of the secret that its ranks share ("" for none) and a name.
Digest job_key(const std::string& secret, const std::string& meeting);

// A rank, as it introduces itself. On the wire as it is: ranks run on the same kind of host.
struct Introduction {
  int32_t rank = 0;
  int32_t size = 0;
  int32_t port = 0;  // where it listens for others
  std::array<char, 72> host{};

  Endpoint endpoint() const;
  void set_endpoint(const Endpoint& endpoint);
};

// The called rank greets with random bytes; the caller introduces itself, with random bytes of its
// own and a code of all that; the called rank answers with a code that covers them, too. Nothing of
// a caller is believed before its code is right. What follows on the connection is not protected.
//
// Never waits: advance() reads and writes what the socket allows.
class Handshake {
 public:
  enum class State {
    kGoing,
    kDone,
    kClosed,    // the other side hung up or is no rank of ours
    kOtherKey,  // a rank that does not know this job's key
  };

  // For a socket that was accepted, or that is being connected to rank `callee`.
  static Handshake as_called(Socket socket, const Digest& key, const Introduction& own);
  static Handshake as_caller(Socket socket, const Digest& key, const Introduction& own, int callee);

  int fd() const { return socket_.fd(); }
  State advance();

  // Who the other side is; its rank is a claim unless the handshake is done.
  const Introduction& other() const { return other_; }
  // Why the connection was not made: errno of a socket that failed, 0 where it was closed.
  int error_code() const { return error_code_; }
  std::chrono::steady_clock::time_point begin() const { return begin_; }
  Socket take_socket() { return std::move(socket_); }

 private:
  using Nonce = std::array<std::byte, 16>;
  struct Greeting {
    uint64_t magic = 0;
    Nonce nonce{};
  };
  struct Call {
    uint64_t magic = 0;
    Nonce nonce{};
    Introduction caller;
    int32_t callee = 0;
    Digest code{};
  };
  struct Answer {
    int32_t knows_key = 0;
    Introduction callee;
    Digest code{};
  };

  Handshake(Socket socket, const Digest& key, const Introduction& own, int callee);
  bool is_called() const { return callee_ < 0; }

  State greet();
  State hear_greeting();
  State hear_call();
  State hear_answer();
  // kDone when all of `message` is there.
  State receive(void* message, size_t bytes);
  State send(const void* message, size_t bytes);
  Digest code_of_call() const;
  Digest code_of_answer() const;

  Socket socket_;
  Digest key_;
  Introduction own_;
  int callee_;  // -1: this rank was called
  Introduction other_;
  std::chrono::steady_clock::time_point begin_ = std::chrono::steady_clock::now();
  int error_code_ = 0;

  State (Handshake::*step_)();
  size_t received_ = 0;  // of the message that is being read
  Greeting greeting_;
  Call call_;
  Answer answer_;
};

// A listening socket and those who call there, of whom some are ranks of the job. Strangers
// (port scanners, old processes, attackers) are not waited for: all callers are heard at
// once, those who stay silent are dropped, and there are never more of them than `max_waiting`.
class Callers {
 public:
  Callers(Socket listener, const Digest& key, const Introduction& own, size_t max_waiting);

  // Adds the sockets to wait for.
  void add_to(std::vector<pollfd>& waiting) const;

  // Hears everybody; calls `welcome` for those who have proved to be of the job.
  void hear(const std::function<void(Introduction caller, Socket socket)>& welcome);

  // Whether a caller who said it was this rank of a job of `size` has proved another key, that long
  // ago.
  bool has_refused(int rank, int size, double seconds_ago) const;

 private:
  void accept();
  void note_refused(const Introduction& stranger);

  Socket listener_;
  const Digest key_;
  const Introduction own_;
  const size_t max_waiting_;
  std::vector<Handshake> waiting_;  // in the order in which they came
  // When the first one called with another key, by the rank and the size that he said.
  std::map<std::pair<int, int>, std::chrono::steady_clock::time_point> refused_;
};

// Where rank 0 can be found.
class MeetingPlace {
 public:
  virtual ~MeetingPlace() = default;
  // Rank 0 listens there now.
  virtual void announce(const Endpoint& endpoint) = 0;
  // nullopt when it is not known yet.
  virtual std::optional<Endpoint> find() = 0;
};

struct TcpMeshOptions {
  int rank = 0;
  int size = 1;
  // Where this process listens, at an address of this host. Rank 0 must say it; others listen at
  // the address from which they reach rank 0 unless they say another.
  Endpoint listen;
  // A secret that all ranks of the job know, and a name for this meeting of theirs.
  std::string secret;
  std::string meeting;
  // Leftovers of an earlier round at the meeting place are not an error until this much
  // time has passed, in which this round's rank 0 replaces it.
  double seconds_for_old_entries = 0;
  // A caller who says it is a rank that has not come, but proves another secret, may be a process
  // of an earlier job or a stranger; if the rank itself has not come after this time, the meeting
  // ends.
  double seconds_for_strangers = 2;
  // How long the processes may take to find each other.
  double timeout_seconds = 600;
  const char* timeout_name = "FSDP_TIMEOUT_S";  // what to raise to wait longer
};

// One connected socket per rank, empty at this rank's own place. Every rank calls rank 0, which
// tells all of them where the others listen once they have come; then every rank calls the ranks
// below it and is called by those above. Both sides of every connection prove that they know the
// secret. Nobody listens any more when this returns. An Error names the ranks that have not come,
// have left, do not know the secret, or disagree about the job's size.
std::vector<Socket> connect_tcp_mesh(MeetingPlace& place, const TcpMeshOptions& options);

}  // namespace fsdp
