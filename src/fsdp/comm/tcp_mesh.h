// How the processes of a job become connected by TCP, each with each.
#pragma once

#include <string>
#include <vector>

#include "fsdp/comm/meeting_store.h"
#include "fsdp/comm/socket.h"

namespace fsdp {

struct TcpMeshOptions {
  int rank = 0;
  int size = 1;
  // The address, of this host, at which the others reach this process.
  std::string address;
  // What the keys in the store begin with.
  std::string prefix;
  // What an earlier round of the same job left in the store is not an error until this much time
  // has passed, in which this round's processes replace it.
  double seconds_for_old_entries = 0;
  // How long the processes may take to find each other.
  double timeout_seconds = 600;
  const char* timeout_name = "FSDP_TIMEOUT_S";  // what to raise to wait longer
};

// One connected socket per rank, empty at this rank's own place. Every rank publishes where it
// listens, connects to all ranks below it and is called by all above; both sides prove that they
// read the store. An Error names the ranks that have not come, or that disagree about the job's
// size.
std::vector<Socket> connect_tcp_mesh(MeetingStore& store, const TcpMeshOptions& options);

}  // namespace fsdp
