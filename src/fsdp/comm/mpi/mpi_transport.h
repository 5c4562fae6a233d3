// One process's membership in an MPI job: start, end, and messages.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "fsdp/comm/message/message_transport.h"

namespace fsdp {

// Everything is point-to-point on one MPI communicator, told apart by channel numbers (MPI tags).
// MPI's own collectives and communicators are not used: theirs wait without deadline, do not say
// who is missing, sum in an order of their choice, and cannot be named in messages.
class MpiTransport final : public MessageTransport {
 public:
  // The runtime of this process; started by the first call, shared by all communicators.
  static std::shared_ptr<MpiTransport> shared();
  // Ends MPI, unless something failed: an orderly end would wait for ranks that may never come.
  ~MpiTransport();

  void exchange(int channel, std::span<const Message> sends, std::span<const Message> receives,
                const Purpose& purpose) override;
  void listen() override;
  void tell_everybody(const std::string& message, Words words) override;
  void keep_forever(std::shared_ptr<void> object) override;

 private:
  class Pending;
  struct Listener;

  MpiTransport();
  void post_listener();

  std::mutex mutex_;  // protects the members below
  bool failed_ = false;
  std::unique_ptr<Listener> listener_;
  std::deque<std::string> outgoing_;  // messages about failures, kept until the end
  std::vector<std::shared_ptr<void>> kept_forever_;
};

}  // namespace fsdp
