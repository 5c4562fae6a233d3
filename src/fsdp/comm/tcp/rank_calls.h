// The socket at which other ranks, and strangers, call; and the calls by which a rank becomes
// connected with others whose addresses it knows.
#pragma once

#include <poll.h>

#include <chrono>
#include <cstddef>
#include <functional>
#include <map>
#include <utility>
#include <vector>

#include "fsdp/base/hmac_sha256.h"
#include "fsdp/comm/tcp/handshake.h"
#include "fsdp/comm/tcp/tcp_connection.h"

namespace fsdp {

// Takes whoever has proved to be a rank of the job.
using Welcome = std::function<void(const Introduction& other, Socket socket)>;

// A listening socket and those who call there, of whom some are ranks of the job. Strangers
// (port scanners, old processes, attackers) are not waited for: all callers are heard at
// once, those who stay silent are dropped, and there are never more of them than `max_waiting`.
class Callers {
 public:
  Callers(Socket listener, const Digest& key, const Introduction& own, size_t max_waiting);

  // Adds the sockets to wait for.
  void add_to(std::vector<pollfd>& waiting) const;

  // Hears everybody; calls `welcome` for those who have proved to be of the job.
  void hear(const Welcome& welcome);

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

// This rank calls ranks below it, and is called by those above. Never waits: advance() reads and
// writes what the sockets allow.
class RankCalls {
 public:
  // `ranks`: all of the job by rank, with the places where they listen.
  RankCalls(std::vector<Introduction> ranks, int own, const Digest& key, Callers callers);

  // Nothing where the rank is being called already.
  void call(int peer);

  // Adds the sockets to wait for.
  void add_to(std::vector<pollfd>& waiting) const;

  // Welcomes called ranks and callers. An Error when a called rank cannot be reached or knows
  // another secret.
  void advance(const Welcome& welcome);

 private:
  Handshake begin(int peer) const;
  bool is_answered(int peer, Handshake& handshake, const Welcome& welcome);

  const std::vector<Introduction> ranks_;
  const int own_;
  const Digest key_;
  Callers callers_;
  std::map<int, Handshake> calls_;  // by the rank that is called
};

}  // namespace fsdp
