#include "fsdp/comm/connect_tcp.h"

#include <sys/stat.h>

#include <chrono>
#include <mutex>
#include <string>

#include "fsdp/base/durable_file.h"
#include "fsdp/base/env.h"
#include "fsdp/base/error.h"
#include "fsdp/base/log.h"
#include "fsdp/comm/meeting_place.h"
#include "fsdp/comm/message_communicator.h"
#include "fsdp/comm/tcp_mesh.h"
#include "fsdp/comm/tcp_transport.h"

namespace fsdp {

namespace {

using Clock = std::chrono::steady_clock;

// How long what an earlier round of the same job left in torchrun's store may take to be replaced.
constexpr double kSecondsForOldEntries = 5;

// Short ones can be guessed by whoever has heard a handshake.
constexpr size_t kMinSecretBytes = 16;
constexpr int64_t kMaxSecretBytes = 4096;

std::string read_secret_file(const std::string& path) {
  struct stat status {};
  if (::stat(path.c_str(), &status) == 0 && (status.st_mode & (S_IRWXG | S_IRWXO)) != 0)
    log(LogLevel::kWarning, "FSDP_SECRET_FILE ", path,
        " can be read by others: chmod 600 keeps it for you");
  const std::string text = read_text_file(path, kMaxSecretBytes);
  return text.substr(0, text.find_last_not_of(" \t\r\n") + 1);
}

// What the job's ranks share; "" when nothing was said.
std::string job_secret() {
  const std::optional<std::string> secret = env_text("FSDP_SECRET");
  const std::optional<std::string> file = env_text("FSDP_SECRET_FILE");
  FSDP_CHECK(!secret || !file, "both FSDP_SECRET and FSDP_SECRET_FILE are set: unset one");
  if (!secret && !file) return "";
  const std::string text = file ? read_secret_file(*file) : *secret;
  FSDP_CHECK(text.size() >= kMinSecretBytes, file ? "FSDP_SECRET_FILE" : "FSDP_SECRET", " has ",
             text.size(), " characters: it needs ", kMinSecretBytes,
             " or more, e.g. of openssl rand -hex 32");
  return text;
}

// A restarted job, or a second World of the same processes, must not take part in an old meeting.
std::string meeting_name(int num_joined_before) {
  return concat("fsdp/", env_text("TORCHELASTIC_RUN_ID").value_or("job"), "/",
                env_text("TORCHELASTIC_RESTART_COUNT").value_or("0"), "/", num_joined_before);
}

// Rank 0 at the address it was given; nobody listens at all addresses of a host unless told to.
Endpoint where_to_listen(const Launch& launch) {
  const std::optional<std::string> address = env_text("FSDP_HOST_ADDRESS");
  const int port = launch.rank == 0 && !agent_holds_store() ? launch.master_port : 0;
  if (address) return {*address, port};
  if (launch.rank > 0) return {};
  const std::string own = own_address(launch.master_address);
  FSDP_CHECK(launch.local_size == launch.size || !is_loopback(own), "rank 0 would listen at ", own,
             ", which is what MASTER_ADDR '", launch.master_address,
             "' means on its host, and other hosts could not reach it: set FSDP_HOST_ADDRESS there "
             "to its address in their network");
  return {own, port};
}

std::shared_ptr<MessageTransport> join_job(const Launch& launch, const CommOptions& options,
                                           int num_joined_before) {
  const Deadline deadline =
      Clock::now() +
      std::chrono::ceil<Clock::duration>(std::chrono::duration<double>(options.timeout_seconds));
  TcpMeshOptions mesh;
  mesh.rank = launch.rank;
  mesh.size = launch.size;
  mesh.secret = job_secret();
  mesh.meeting = meeting_name(num_joined_before);
  const std::unique_ptr<MeetingPlace> place = open_meeting_place(launch, mesh.meeting, deadline);
  mesh.listen = where_to_listen(launch);
  mesh.seconds_for_old_entries = agent_holds_store() ? kSecondsForOldEntries : 0;
  mesh.timeout_seconds = options.timeout_seconds;
  mesh.timeout_name = options.timeout_name;
  return std::make_shared<TcpTransport>(launch.rank, connect_tcp_mesh(*place, mesh));
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
