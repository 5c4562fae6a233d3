#include "fsdp/comm/world.h"

#include <ATen/Context.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/AutogradState.h>

#include <algorithm>
#include <exception>
#include <mutex>
#include <numeric>
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
#include "fsdp/comm/rank_facts.h"
#include "fsdp/comm/reduce/sum_order.h"
#include "fsdp/comm/threads/threads_communicator.h"

namespace fsdp {

namespace {

std::shared_ptr<Rendezvous> meeting_place(int ranks, const CommOptions& options) {
  options.validate();
  return std::make_shared<Rendezvous>("world", ranks, options, std::make_shared<AbortSignal>());
}

// Threads of one process are one host.
int sum_group_of_threads(int ranks, const CommOptions& options) {
  return chosen_group(options.sum_group, std::vector<int>(static_cast<size_t>(ranks)));
}

RankPlace place_of(const Launch& launch, const CommOptions& options) {
  RankPlace place{.host = this_host(),
                  .gpu = "",
                  .has_nccl = nccl_available(),
                  .nccl = options.nccl,
                  .sum_group = options.sum_group};
  // A process that does not ask for NCCL may not want CUDA to begin, either.
  const bool asks = options.nccl != NcclUse::kOff && at::hasCUDA();
  const int num_gpus = asks ? at::detail::getCUDAHooks().deviceCount() : 0;
  if (num_gpus == 0) return place;
  const int gpu = gpu_of_rank(launch.local_rank, num_gpus);
  place.gpu = place.has_nccl ? nccl_gpu_id(gpu) : concat("cuda:", gpu);
  return place;
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
  // `members`: their world ranks.
  SimulatedCommunicator(int rank, std::vector<int> members, std::string name, int sum_group,
                        std::shared_ptr<Recording> recording)
      : Communicator(rank, static_cast<int>(members.size()), std::move(name), sum_group),
        members_(std::move(members)),
        recording_(std::move(recording)) {}

  void abort(const std::string& message) override { throw AbortedError(message); }

 private:
  std::unique_ptr<Communicator> split_off(Subgroup part) override {
    for (int& member : part.members) member = members_[static_cast<size_t>(member)];
    return std::make_unique<SimulatedCommunicator>(
        part.rank, std::move(part.members), std::move(part.name), part.sum_group, recording_);
  }
  Work enqueue(Operation operation) override {
    if (operation.print.kind == OpKind::kCopy) return Work();  // within one rank: not recorded
    operation.print.sequence = next_sequence_++;
    recording_->push_back({name(), members_.front(), size(), sum_group(), operation.print});
    return Work();
  }

  const std::vector<int> members_;
  const std::shared_ptr<Recording> recording_;
  uint64_t next_sequence_ = 0;
};

// The world of this process, whose ranks `connect` brings together. All of them tell each other
// where they are, and choose alike how tensors travel.
template <typename Connect>
World joined_world(Launch launch, const char* hosts_name, const CommOptions& options,
                   const Connect& connect) {
  if (launch.size > 1) set_thread_rank(launch.rank);
  std::unique_ptr<Communicator> hosts =
      launch.size == 1 ? std::make_unique<ThreadsCommunicator>(0, meeting_place(1, options), 1)
                       : connect(launch);
  if (launch.size == 1 && options.nccl != NcclUse::kAlways)
    return World(std::move(launch), std::move(hosts));
  const std::vector<RankPlace> places = places_of_ranks(*hosts, place_of(launch, options));
  if (nccl_available()) launch.gpu_ranks = ranks_on_gpu_of(launch.rank, places);
  const Transport transport = choose_transport(places, hosts_name);
  if (!transport.error.empty()) throw Error(transport.error);
  if (launch.rank == 0) log(LogLevel::kInfo, transport.sentence);
  hosts->set_sum_group(transport.sum_group);
  if (transport.by_nccl) hosts = over_nccl(std::move(hosts), launch.local_rank, options);
  return World(std::move(launch), std::move(hosts), transport.sentence);
}

}  // namespace

World::World(Launch launch, std::unique_ptr<Communicator> communicator, std::string transport)
    : launch_(std::move(launch)),
      transport_(std::move(transport)),
      communicator_(std::move(communicator)) {
  choose_torch_math();  // every rank comes here before it computes
}

World::World(World&&) noexcept = default;
World& World::operator=(World&&) noexcept = default;
World::~World() = default;

int World::rank() const { return communicator_->rank(); }
int World::size() const { return communicator_->size(); }

World World::from_environment(const CommOptions& options) {
  Launch launch = read_launch();
  const bool by_tcp = launch.launcher == Launcher::kTorchrun;
  return joined_world(std::move(launch), by_tcp ? "TCP" : "MPI", options, [&](const Launch& place) {
    return by_tcp ? connect_tcp(place, options) : connect_mpi(place, options);
  });
}

World World::from_store(c10d::Store& store, const Launch& place, const std::string& meeting,
                        const CommOptions& options) {
  return joined_world(place, "TCP", options, [&](const Launch& launch) {
    return connect_tcp_by_store(launch, options, store, meeting);
  });
}

World World::simulated(int rank, int size, std::shared_ptr<Recording> recording,
                       const CommOptions& options) {
  Launch launch;
  launch.rank = rank;
  launch.size = size;
  launch.local_size = size;
  std::vector<int> members(static_cast<size_t>(size));
  std::iota(members.begin(), members.end(), 0);
  return World(launch, std::make_unique<SimulatedCommunicator>(rank, std::move(members), "world",
                                                               sum_group_of_threads(size, options),
                                                               std::move(recording)));
}

void run_threads(int ranks, const CommOptions& options, const std::function<void(World&)>& body) {
  FSDP_CHECK(ranks >= 1, "ranks is ", ranks, ": it must be 1 or more");
  const std::shared_ptr<Rendezvous> rendezvous = meeting_place(ranks, options);
  const int sum_group = sum_group_of_threads(ranks, options);
  FirstError first_error;
  const auto run_rank = [&](int rank) {
    c10::AutogradState::get_tls_state().set_multithreading_enabled(false);
    if (ranks > 1) set_thread_rank(rank);
    Launch launch;
    launch.rank = launch.local_rank = rank;
    launch.size = launch.local_size = ranks;
    std::optional<World> world;  // closed after the error's words have been passed on
    try {
      world.emplace(launch, std::make_unique<ThreadsCommunicator>(rank, rendezvous, sum_group));
      body(*world);
    } catch (const RemoteError& error) {
      first_error.note_consequence(std::current_exception());
      if (!rendezvous->abort().raised()) rendezvous->abort().raise(error.what());
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
