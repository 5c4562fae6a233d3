#include "fsdp/comm/connect_tcp.h"

#include <chrono>
#include <mutex>
#include <string>

#include "fsdp/base/env.h"
#include "fsdp/base/error.h"
#include "fsdp/comm/meeting_store.h"
#include "fsdp/comm/message_communicator.h"
#include "fsdp/comm/tcp_mesh.h"
#include "fsdp/comm/tcp_transport.h"

namespace fsdp {

namespace {

using Clock = std::chrono::steady_clock;

// How long what an earlier round of the same job left in torchrun's store may take to be replaced.
constexpr double kSecondsForOldEntries = 5;

std::shared_ptr<MessageTransport> join_job(const Launch& launch, const CommOptions& options,
                                           int num_joined_before) {
  const Deadline deadline =
      Clock::now() +
      std::chrono::ceil<Clock::duration>(std::chrono::duration<double>(options.timeout_seconds));
  const std::shared_ptr<MeetingStore> store = open_meeting_store(launch, deadline);
  TcpMeshOptions mesh;
  mesh.rank = launch.rank;
  mesh.size = launch.size;
  const std::optional<std::string> address = env_text("FSDP_HOST_ADDRESS");
  mesh.address = address ? *address : address_towards({launch.master_address, launch.master_port});
  mesh.prefix = concat(meeting_prefix(), num_joined_before, "/");
  mesh.seconds_for_old_entries = agent_holds_store() ? kSecondsForOldEntries : 0;
  mesh.timeout_seconds = options.timeout_seconds;
  mesh.timeout_name = options.timeout_name;
  return std::make_shared<TcpTransport>(launch.rank, connect_tcp_mesh(*store, mesh));
}

}  // namespace

std::unique_ptr<Communicator> connect_tcp(const Launch& launch, const CommOptions& options) {
  options.validate();
  static std::mutex mutex;
  static std::weak_ptr<MessageTransport> current;
  static int num_joined = 0;
  const std::lock_guard lock(mutex);
  std::shared_ptr<MessageTransport> transport = current.lock();
  if (!transport) current = transport = join_job(launch, options, num_joined++);
  return communicator_over(std::move(transport), options);
}

}  // namespace fsdp
