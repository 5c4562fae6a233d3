// The `tcp` backend: processes that were started by torchrun, or with its variables, find each
// other and become connected.
#include <sys/stat.h>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include <chrono>
#include <mutex>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "fsdp/base/check.h"
#include "fsdp/base/durable_file.h"
#include "fsdp/base/env.h"
#include "fsdp/base/log.h"
#include "fsdp/base/text.h"
#include "fsdp/comm/backends.h"
#include "fsdp/comm/comm_error.h"
#include "fsdp/comm/tcp/tcp_mesh.h"
#include "fsdp/comm/tcp/tcp_transport.h"

namespace fsdp {

namespace {

using Clock = std::chrono::steady_clock;

// Rank 0 is where everybody was told it would be.
class KnownPlace final : public MeetingPlace {
 public:
  explicit KnownPlace(Endpoint endpoint) : endpoint_(std::move(endpoint)) {}
  void announce(const Endpoint& /*endpoint*/) override {}
  std::optional<Endpoint> find() override { return endpoint_; }

 private:
  const Endpoint endpoint_;
};

// The first line of the message: libtorch's messages go on with stack traces.
std::string first_line(const std::exception& error) {
  const std::string text = error.what();
  return shown(text.substr(0, text.find('\n')), 500);
}

// A store of libtorch's, in which rank 0 leaves its address.
class StorePlace final : public MeetingPlace {
 public:
  // `owner` names the store in errors.
  StorePlace(c10::intrusive_ptr<c10d::Store> store, std::string key, std::string owner)
      : store_(std::move(store)), key_(std::move(key)), owner_(std::move(owner)) {}

  void announce(const Endpoint& endpoint) override {
    const std::string text = concat(endpoint.host, " ", endpoint.port);
    guarded(owner_, [&] {
      store_->set(key_, std::vector<uint8_t>(text.begin(), text.end()));
      return 0;
    });
  }

  // Asks rather than waits: libtorch's waiting fills the terminal with warnings.
  std::optional<Endpoint> find() override {
    return guarded(owner_, [&]() -> std::optional<Endpoint> {
      if (!store_->check({key_})) return std::nullopt;
      const std::vector<uint8_t> bytes = store_->get(key_);
      std::istringstream in(std::string(bytes.begin(), bytes.end()));
      Endpoint found;
      in >> found.host >> found.port;
      return in ? std::optional(found) : std::nullopt;
    });
  }

  template <typename Body>
  static auto guarded(const std::string& owner, Body body) -> decltype(body()) {
    try {
      return body();
    } catch (const c10::Error& error) {
      throw CommError(concat("the store of ", owner, " does not answer: ", first_line(error)));
    }
  }

 private:
  const c10::intrusive_ptr<c10d::Store> store_;
  const std::string key_;
  const std::string owner_;
};

// libtorch reports every failed attempt to connect, so its store is opened only when somebody
// listens there.
void wait_until_somebody_listens(const Endpoint& endpoint, Deadline deadline) {
  const auto begin = Clock::now();
  while (true) {
    const Deadline attempt = std::min(deadline, Clock::now() + std::chrono::seconds(5));
    if (try_connect(endpoint, attempt)) return;
    if (Clock::now() >= deadline) break;
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  }
  const std::chrono::duration<double> waited = Clock::now() - begin;
  throw TimeoutError(concat("nobody listens at MASTER_ADDR:MASTER_PORT, ", endpoint.text(),
                            ", after ", static_cast<int64_t>(waited.count() + 0.5),
                            " s: torchrun's agent should; look at what it does, or correct the "
                            "address"));
}

// Whether torchrun's agent has a store open at MASTER_ADDR:MASTER_PORT (libtorch's c10d::TCPStore),
// in which an earlier round of the job may have left words.
bool agent_holds_store() { return env_text("TORCHELASTIC_USE_AGENT_STORE") == "True"; }

// The meeting place of the meeting with that name. The agent's store, in which rank 0 leaves its
// address; otherwise rank 0 itself listens at MASTER_ADDR:MASTER_PORT. An Error when the store
// cannot be reached.
std::unique_ptr<MeetingPlace> open_meeting_place(const Launch& launch, const std::string& meeting,
                                                 Deadline deadline) {
  const Endpoint endpoint{launch.master_address, launch.master_port};
  if (!agent_holds_store()) return std::make_unique<KnownPlace>(endpoint);
  wait_until_somebody_listens(endpoint, deadline);
  c10d::TCPStoreOptions options;
  options.port = static_cast<uint16_t>(launch.master_port);
  options.waitWorkers = false;
  options.timeout =
      std::max(std::chrono::milliseconds(1000),
               std::chrono::duration_cast<std::chrono::milliseconds>(deadline - Clock::now()));
  const std::string owner = concat("torchrun at MASTER_ADDR:MASTER_PORT, ", endpoint.text(), ",");
  auto store = StorePlace::guarded(
      owner, [&] { return c10::make_intrusive<c10d::TCPStore>(endpoint.host, options); });
  return std::make_unique<StorePlace>(std::move(store), meeting, owner);
}

// How long rank 0 may take to replace the address that an earlier round of the same job left in
// torchrun's store.
constexpr double kSecondsForOldEntries = 5;

// Shorter secrets can be guessed by somebody who has recorded a handshake.
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

// The secret that the job's ranks share; "" when none was given.
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

// Where this process listens: rank 0 at the address it was given and at that port, the others where
// rank 0 reaches them. No process listens at all addresses of its host unless it is told to.
Endpoint where_to_listen(const Launch& launch, int port_of_rank_zero) {
  const std::optional<std::string> address = env_text("FSDP_HOST_ADDRESS");
  const int port = launch.rank == 0 ? port_of_rank_zero : 0;
  if (address) return {*address, port};
  if (launch.rank > 0) return {};
  const std::string own = own_address(launch.master_address);
  if (own == "0.0.0.0" || own == "::")
    log(LogLevel::kWarning, "MASTER_ADDR is ", launch.master_address,
        ", so rank 0 listens at every address of its host; set it to the one that all ranks use");
  FSDP_CHECK(launch.local_size == launch.size || !is_loopback(own), "rank 0 would listen at ", own,
             ", which is what MASTER_ADDR '", launch.master_address,
             "' means on its host, and other hosts could not reach it: set FSDP_HOST_ADDRESS there "
             "to its address in their network");
  return {own, port};
}

Deadline deadline_of(const CommOptions& options) {
  return Clock::now() +
         std::chrono::ceil<Clock::duration>(std::chrono::duration<double>(options.timeout_seconds));
}

std::shared_ptr<MessageTransport> join_at(const Launch& launch, const CommOptions& options,
                                          MeetingPlace& place, const std::string& meeting,
                                          int port_of_rank_zero, double seconds_for_old_entries) {
  TcpMeshOptions mesh;
  mesh.rank = launch.rank;
  mesh.size = launch.size;
  mesh.secret = job_secret();
  mesh.meeting = meeting;
  mesh.listen = where_to_listen(launch, port_of_rank_zero);
  mesh.seconds_for_old_entries = seconds_for_old_entries;
  mesh.timeout_seconds = options.timeout_seconds;
  mesh.timeout_name = options.timeout_name;
  return std::make_shared<TcpTransport>(launch.rank, connect_tcp_mesh(place, mesh));
}

std::shared_ptr<MessageTransport> join_job(const Launch& launch, const CommOptions& options,
                                           int num_joined_before) {
  const std::string meeting = meeting_name(num_joined_before);
  const std::unique_ptr<MeetingPlace> place =
      open_meeting_place(launch, meeting, deadline_of(options));
  const bool is_store = agent_holds_store();
  return join_at(launch, options, *place, meeting, is_store ? 0 : launch.master_port,
                 is_store ? kSecondsForOldEntries : 0);
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

std::unique_ptr<Communicator> connect_tcp_by_store(const Launch& launch, const CommOptions& options,
                                                   c10d::Store& store, const std::string& meeting) {
  options.validate();
  StorePlace place(c10::intrusive_ptr<c10d::Store>::reclaim_copy(&store), meeting,
                   "torch.distributed");
  return communicator_over(join_at(launch, options, place, meeting, /*port_of_rank_zero=*/0,
                                   /*seconds_for_old_entries=*/0),
                           options);
}

}  // namespace fsdp
