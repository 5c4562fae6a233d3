// A listening socket and those who call there, of whom some are ranks of the job.
#pragma once

#include <poll.h>

#include <functional>
#include <vector>

#include "fsdp/comm/handshake.h"
#include "fsdp/comm/socket.h"

namespace fsdp {

// Strangers (port scanners, old processes, attackers) are not waited for: all callers are heard at
// once, those who stay silent are dropped, and there are never more of them than `max_waiting`.
class Callers {
 public:
  Callers(Socket listener, const Digest& key, const Introduction& own, size_t max_waiting);

  // Adds the sockets to wait for.
  void add_to(std::vector<pollfd>& waiting) const;

  // Hears everybody; calls `welcome` for those who have proved to be of the job.
  void hear(const std::function<void(Introduction caller, Socket socket)>& welcome);

 private:
  void accept();

  Socket listener_;
  const Digest key_;
  const Introduction own_;
  const size_t max_waiting_;
  std::vector<Handshake> waiting_;  // in the order in which they came
  bool has_warned_ = false;
};

}  // namespace fsdp
