// How the processes of a job find each other, and become connected by TCP.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "fsdp/comm/tcp/rank_calls.h"
#include "fsdp/comm/tcp/tcp_connection.h"

namespace fsdp {

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
  // Up to this many ranks are connected each with each when they have met, so that one that another
  // cannot reach is named before the first step. More than that would hold half a million
  // connections for a thousand ranks, of which collectives of tensors on GPUs need ten of each.
  int max_meshed_ranks = 64;
};

// The connections of a rank whose job has met.
struct TcpMesh {
  std::vector<Socket> sockets;  // by rank; empty at this rank's own place, and where there is none
  std::unique_ptr<RankCalls> calls;  // makes those that there are not yet; nullptr where all are
};

// Every rank calls rank 0, which tells all of them where the others listen once they have come.
// Then every rank calls the ranks below it and is called by those above: at once in a small job, of
// which nobody listens any more when this returns; in a large one when they have something to say
// to each other. Both sides of every connection prove that they know the secret. An Error names the
// ranks that have not come, have left, do not know the secret, or disagree about the job's size.
TcpMesh connect_tcp_mesh(MeetingPlace& place, const TcpMeshOptions& options);

}  // namespace fsdp
