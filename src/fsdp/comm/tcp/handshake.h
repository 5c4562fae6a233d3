// The handshake by which two ranks prove that they know the job's key.
#pragma once

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>

#include "fsdp/base/hmac_sha256.h"
#include "fsdp/comm/comm_error.h"
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

// The error of a meeting in which two ranks do not know one key.
CommError other_key_error(int peer, int rank);

}  // namespace fsdp
