// How the processes of a job become connected by TCP, each with each.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "fsdp/comm/tcp/socket.h"

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
  // What all ranks of the job know, and a name for this meeting of theirs.
  std::string secret;
  std::string meeting;
  // What an earlier round of the same job left at the meeting place is not an error until this much
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
