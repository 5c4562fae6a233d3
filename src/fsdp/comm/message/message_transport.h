// How processes exchange messages: what a communicator over processes stands on.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "fsdp/comm/comm_error.h"

namespace fsdp {

// One message to or from a rank of the job. Empty messages are not sent.
struct Message {
  int peer = 0;  // world rank
  char* data = nullptr;
  int64_t bytes = 0;
};

// The purpose of an exchange, and how long it may take: the words of its errors.
struct Purpose {
  std::string what;  // "rank 1 of 'inner gather' at operation 3: ..."
  double timeout_seconds = 0;
  const char* timeout_name = "FSDP_TIMEOUT_S";  // what to raise to wait longer
};

// Point-to-point messages on numbered channels; one per communicator, so that communicators do not
// wait for each other. On one channel a process has at most one exchange at a time, and two
// processes exchange their messages in the same order.
//
// A failure is one of the whole job: once a rank has told of it, every exchange of every rank ends.
//
// Thread-safe: every communicator has its own worker.
class MessageTransport {
 public:
  virtual ~MessageTransport() = default;
  MessageTransport(const MessageTransport&) = delete;
  MessageTransport& operator=(const MessageTransport&) = delete;

  int rank() const { return rank_; }
  int size() const { return size_; }

  // Sends and receives all messages; returns when all have arrived. Throws at the deadline (naming
  // whose messages are missing), when a message has another size than expected, and on abort; the
  // buffers must then be handed to `keep_forever`, since the transport may still use them.
  virtual void exchange(int channel, std::span<const Message> sends,
                        std::span<const Message> receives, const Purpose& purpose) = 0;

  // Takes messages about failures from other ranks; cheap, called between other work.
  virtual void listen() = 0;

  // Throws when a rank of the job has failed; gives its words a moment to come.
  void throw_if_aborted();

  // Tells every rank of the job that this one failed; kInPassing when its words will follow.
  enum class Words { kInPassing, kFinal };
  virtual void tell_everybody(const std::string& message, Words words) = 0;

  // This process's proposal for a new channel's number, and the agreed one (the largest proposal).
  int propose_channel();
  void agree_on_channel(int channel);

  // Keeps memory of a failed exchange alive as long as the transport may use it.
  virtual void keep_forever(std::shared_ptr<void> object) = 0;

  static constexpr int kFailureChannel = 0;
  static constexpr int kWorldChannel = 1;

 protected:
  MessageTransport(int rank, int size) : rank_(rank), size_(size) {}

  // Raises the signal for this rank's failure. Returns the text to send to the other ranks; "" when
  // they have heard of the failure already.
  std::string raise_own(const std::string& message, Words words);
  // Raises the signal for a failure that another rank told of. Its words go to this process's
  // terminal: they are shown without control characters.
  void raise_heard(std::string_view text);
  static constexpr int64_t kMaxTextBytes = 2048;

  int rank_;
  int size_;
  AbortSignal abort_;

 private:
  std::mutex channel_mutex_;  // protects the member below
  int next_channel_ = kWorldChannel + 1;
};

// Waiting without burning a core that another rank may need: first yield, then sleep ever longer.
class Backoff {
 public:
  void pause();

 private:
  int rounds_ = 0;
};

// This process's membership in its MPI job: started by the first call, shared by all communicators.
// Only where mpi_available().
bool mpi_available();
std::shared_ptr<MessageTransport> mpi_transport();

// The errors of an exchange, in the same words for every transport.
TimeoutError late_error(const Purpose& purpose, const std::vector<std::string>& missing_ranks);
CommError size_error(const Purpose& purpose, int peer, int64_t bytes, int64_t expected_bytes);

}  // namespace fsdp
