#include "fsdp/comm/world.h"

#include <ATen/Context.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/AutogradState.h>

#include <algorithm>
#include <exception>
#include <mutex>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

#include "fsdp/base/check.h"
#include "fsdp/base/log.h"
#include "fsdp/base/start_thread.h"
#include "fsdp/base/torch_math.h"
#include "fsdp/comm/backends.h"
#include "fsdp/comm/comm_error.h"
#include "fsdp/comm/communicator.h"
#include "fsdp/comm/enqueued_operation.h"
#include "fsdp/comm/threads/threads_communicator.h"

namespace fsdp {

namespace {

std::shared_ptr<Rendezvous> meeting_place(int ranks, const CommOptions& options) {
  options.validate();
  return std::make_shared<Rendezvous>("world", ranks, options, std::make_shared<AbortSignal>());
}

std::unique_ptr<Communicator> connect_hosts(const Launch& launch, const CommOptions& options) {
  if (launch.size == 1) return std::make_unique<ThreadsCommunicator>(0, meeting_place(1, options));
  if (launch.launcher == Launcher::kTorchrun) return connect_tcp(launch, options);
  return connect_mpi(launch, options);
}

bool uses_nccl(const Launch& launch, const CommOptions& options) {
  if (options.nccl != NcclUse::kAuto) return options.nccl == NcclUse::kAlways;
  if (launch.size == 1 || !nccl_available() || !at::hasCUDA()) return false;
  const int num_devices = at::detail::getCUDAHooks().deviceCount();
  if (num_devices >= launch.local_size) return true;
  log(LogLevel::kInfo, launch.local_size, " processes of this host share ", num_devices,
      " GPUs, which NCCL does not do; device tensors go through host memory");
  return false;
}

std::unique_ptr<Communicator> with_nccl(std::unique_ptr<Communicator> hosts, const Launch& launch,
                                        const CommOptions& options) {
  if (!uses_nccl(launch, options)) return hosts;
  return over_nccl(std::move(hosts), launch.local_rank, options);
}

// The error of the rank that failed by itself, rather than of those that failed because of it.
class FirstError {
 public:
  void note_cause(std::exception_ptr error) { note(cause_, std::move(error)); }
  void note_consequence(std::exception_ptr error) { note(consequence_, std::move(error)); }

  // After all ranks have ended.
  void rethrow() const {
    if (cause_) std::rethrow_exception(cause_);
    if (consequence_) std::rethrow_exception(consequence_);
  }

 private:
  void note(std::exception_ptr& place, std::exception_ptr error) {
    const std::lock_guard lock(mutex_);
    if (!place) place = std::move(error);
  }

  std::mutex mutex_;
  std::exception_ptr cause_;
  std::exception_ptr consequence_;
};

// The `simulated` backend: a world of any size seen from one rank; moves nothing, records every
// call. Checks arguments like every backend, so a dry run finds wrong sizes; outputs stay as they
// are.
class SimulatedCommunicator final : public Communicator {
 public:
  SimulatedCommunicator(int rank, int size, std::string name, std::shared_ptr<Recording> recording);

  std::unique_ptr<Communicator> split(std::span<const int> colors, std::string name) override;
  void abort(const std::string& message) override;

 private:
  Work enqueue(Operation operation) override;

  const std::shared_ptr<Recording> recording_;
  uint64_t next_sequence_ = 0;
};

SimulatedCommunicator::SimulatedCommunicator(int rank, int size, std::string name,
                                             std::shared_ptr<Recording> recording)
    : Communicator(rank, size, std::move(name)), recording_(std::move(recording)) {}

Work SimulatedCommunicator::enqueue(Operation operation) {
  if (operation.print.kind == OpKind::kCopy) return Work();  // within one rank: not recorded
  operation.print.sequence = next_sequence_++;
  recording_->push_back({name(), size(), operation.print});
  return Work();
}

std::unique_ptr<Communicator> SimulatedCommunicator::split(std::span<const int> colors,
                                                           std::string name) {
  const std::vector<int> members = members_of(colors);
  const auto position = std::find(members.begin(), members.end(), rank()) - members.begin();
  return std::make_unique<SimulatedCommunicator>(
      static_cast<int>(position), static_cast<int>(members.size()), std::move(name), recording_);
}

void SimulatedCommunicator::abort(const std::string& message) { throw AbortedError(message); }

}  // namespace

World::World(Launch launch, std::unique_ptr<Communicator> communicator)
    : launch_(std::move(launch)), communicator_(std::move(communicator)) {
  choose_torch_math();  // every rank comes here before it computes
}

World::World(World&&) noexcept = default;
World& World::operator=(World&&) noexcept = default;
World::~World() = default;

int World::rank() const { return communicator_->rank(); }
int World::size() const { return communicator_->size(); }

World World::from_environment(const CommOptions& options) {
  const Launch launch = read_launch();
  if (launch.size > 1) set_thread_rank(launch.rank);
  return World(launch, with_nccl(connect_hosts(launch, options), launch, options));
}

World World::from_store(c10d::Store& store, const Launch& launch, const std::string& meeting,
                        const CommOptions& options) {
  if (launch.size > 1) set_thread_rank(launch.rank);
  std::unique_ptr<Communicator> hosts =
      launch.size == 1 ? std::make_unique<ThreadsCommunicator>(0, meeting_place(1, options))
                       : connect_tcp_by_store(launch, options, store, meeting);
  return World(launch, with_nccl(std::move(hosts), launch, options));
}

World World::simulated(int rank, int size, std::shared_ptr<Recording> recording) {
  Launch launch;
  launch.rank = rank;
  launch.size = size;
  launch.local_size = size;
  return World(launch,
               std::make_unique<SimulatedCommunicator>(rank, size, "world", std::move(recording)));
}

void run_threads(int ranks, const CommOptions& options, const std::function<void(World&)>& body) {
  FSDP_CHECK(ranks >= 1, "ranks is ", ranks, ": it must be 1 or more");
  const std::shared_ptr<Rendezvous> rendezvous = meeting_place(ranks, options);
  FirstError first_error;
  const auto run_rank = [&](int rank) {
    c10::AutogradState::get_tls_state().set_multithreading_enabled(false);
    if (ranks > 1) set_thread_rank(rank);
    Launch launch;
    launch.rank = launch.local_rank = rank;
    launch.size = launch.local_size = ranks;
    std::optional<World> world;  // closed after the error's words have been passed on
    try {
      world.emplace(launch, std::make_unique<ThreadsCommunicator>(rank, rendezvous));
      body(*world);
    } catch (const AbortedError&) {
      first_error.note_consequence(std::current_exception());
    } catch (const std::exception& error) {
      first_error.note_cause(std::current_exception());
      rendezvous->abort().raise(concat("rank ", rank, " failed: ", error.what()));
    }
  };
  std::vector<std::thread> threads;
  try {
    for (int rank = 0; rank < ranks; ++rank)
      threads.push_back(start_thread(concat("rank ", rank, " of ", ranks),
                                     [&run_rank, rank] { run_rank(rank); }));
  } catch (const std::exception& error) {
    first_error.note_cause(std::current_exception());
    rendezvous->abort().raise(
        error.what());  // ranks that run already must not wait for those that were not started
  }
  for (std::thread& thread : threads) thread.join();
  first_error.rethrow();
}

}  // namespace fsdp
