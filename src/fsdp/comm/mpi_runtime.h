// One process's membership in an MPI job: start and end, numbered channels, messages with
// deadlines.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "fsdp/comm/abort_signal.h"

namespace fsdp {

// One message to or from a rank of the job. Empty messages are not sent.
struct MpiMessage {
  int peer = 0;  // world rank
  char* data = nullptr;
  int64_t bytes = 0;
};

// What an exchange is for, and how long it may take: the words of its errors.
struct MpiPurpose {
  std::string what;  // "rank 1 of 'inner gather' at operation 3: ..."
  double timeout_seconds = 0;
};

// Everything is point-to-point on one MPI communicator, told apart by channel numbers (MPI tags).
// MPI's own collectives and communicators are not used: theirs wait without deadline, do not say
// who is missing, sum in an order of their choice, and cannot be named in messages.
//
// Thread-safe: every communicator has its own worker.
class MpiRuntime {
 public:
  // The runtime of this process; started by the first call, shared by all communicators.
  static std::shared_ptr<MpiRuntime> shared();
  // Ends MPI, unless something failed: an orderly end would wait for ranks that may never come.
  ~MpiRuntime();
  MpiRuntime(const MpiRuntime&) = delete;
  MpiRuntime& operator=(const MpiRuntime&) = delete;

  int rank() const { return rank_; }
  int size() const { return size_; }

  // Sends and receives all messages; returns when all have arrived. Throws at the deadline (naming
  // whose messages are missing), when a message has another size than expected, and on abort; the
  // buffers must then outlive the process (`keep_forever`), since MPI may still write to them.
  void exchange(int channel, std::span<const MpiMessage> sends,
                std::span<const MpiMessage> receives, const MpiPurpose& purpose);

  // Takes messages about failures from other ranks; cheap, called between other work.
  void listen();

  // Throws when a rank of the job has failed.
  void throw_if_aborted();

  // Tells every rank of the job that this one failed; kInPassing when its words will follow.
  enum class Words { kInPassing, kFinal };
  void tell_everybody(const std::string& message, Words words);

  // This process's proposal for a new channel's number, and the agreed one (the largest proposal).
  int propose_channel();
  void agree_on_channel(int channel);

  // Marks the runtime as failed and keeps an object alive until the process ends.
  void keep_forever(std::shared_ptr<void> object);

 private:
  class Pending;
  struct Listener;

  MpiRuntime();
  void post_listener();

  int rank_ = 0;
  int size_ = 1;
  AbortSignal abort_;

  std::mutex mutex_;      // protects the members below
  int next_channel_ = 2;  // 0: failures; 1: the world's communicator
  bool failed_ = false;
  std::unique_ptr<Listener> listener_;
  std::deque<std::vector<char>> outgoing_;  // messages about failures, kept until the end
  std::vector<std::shared_ptr<void>> kept_forever_;
};

}  // namespace fsdp
