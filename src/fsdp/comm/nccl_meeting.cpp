#include "fsdp/comm/nccl_meeting.h"

#include <ATen/ATen.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>

#include "fsdp/comm/comm_error.h"

namespace fsdp {

namespace {

using Clock = std::chrono::steady_clock;
constexpr std::chrono::milliseconds kBetweenLooks{50};

struct Place {
  ncclUniqueId id;
  int rank;
  int size;
  c10::Device device;
};

// What the meeting's thread and the one that waits for it share.
struct Meeting {
  std::mutex mutex;  // protects the members below
  std::condition_variable changed;
  bool is_over = false;
  bool is_given_up = false;
  ncclComm_t comm = nullptr;
  std::exception_ptr error;
};

// The first message between two ranks makes their connection, for which both must be there. One
// letter to everybody, so that no later launch is the first.
void exchange_letters(ncclComm_t comm, const Place& place) {
  if (place.size == 1) return;
  const c10::cuda::CUDAStream stream =
      c10::cuda::getStreamFromPool(/*isHighPriority=*/false, place.device.index());
  const c10::cuda::CUDAStreamGuard guard(stream);
  const at::Tensor letters = at::zeros({2, place.size}, at::device(place.device).dtype(at::kByte));
  auto* sent = letters.mutable_data_ptr<uint8_t>();
  auto* received = sent + place.size;
  ncclResult_t result = ncclGroupStart();
  for (int peer = 0; peer < place.size && result == ncclSuccess; ++peer) {
    if (peer == place.rank) continue;
    result = ncclSend(sent + peer, 1, ncclUint8, peer, comm, stream);
    if (result == ncclSuccess) result = ncclRecv(received + peer, 1, ncclUint8, peer, comm, stream);
  }
  const ncclResult_t launched = ncclGroupEnd();
  if (result == ncclSuccess) result = launched;
  if (result != ncclSuccess) throw_nccl_error(result, "the first message to every rank");
  stream.synchronize();
}

ncclComm_t meet(const Place& place) {
  const c10::cuda::CUDAGuard guard(place.device);
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  config.blocking = 1;
  ncclComm_t comm = nullptr;
  const ncclResult_t made =
      ncclCommInitRankConfig(&comm, place.size, place.id, place.rank, &config);
  if (made != ncclSuccess) throw_nccl_error(made, "ncclCommInitRankConfig");
  try {
    exchange_letters(comm, place);
  } catch (...) {
    ncclCommAbort(comm);
    throw;
  }
  return comm;
}

void run(const std::shared_ptr<Meeting>& meeting, const Place& place) {
  ncclComm_t comm = nullptr;
  std::exception_ptr error;
  try {
    comm = meet(place);
  } catch (...) {
    error = std::current_exception();
  }
  const std::lock_guard lock(meeting->mutex);
  if (meeting->is_given_up && comm != nullptr) ncclCommAbort(comm);
  meeting->comm = comm;
  meeting->error = error;
  meeting->is_over = true;
  meeting->changed.notify_all();
}

// Note [Why a meeting has a thread]
// ncclCommInitRankConfig waits for the other ranks, and in blocking mode nothing ends that. So it
// waits in a thread of its own, which is left behind when the time is up: it keeps what it uses,
// and ends the communicator should it be made after all.
ncclComm_t wait_for(const std::shared_ptr<Meeting>& meeting, Communicator& hosts,
                    const CommOptions& options) {
  const auto deadline = Clock::now() + std::chrono::duration<double>(options.timeout_seconds);
  std::unique_lock lock(meeting->mutex);
  try {
    while (!meeting->changed.wait_for(lock, kBetweenLooks, [&] { return meeting->is_over; })) {
      hosts.throw_if_aborted();
      if (Clock::now() > deadline)
        throw TimeoutError(
            concat("not all ", hosts.size(), " ranks of '", hosts.name(), "' met over NCCL within ",
                   options.timeout_seconds,
                   " s: a rank is gone, is stuck, or cannot be reached by NCCL "
                   "(NCCL_DEBUG=INFO shows its network); if they need longer, raise ",
                   options.timeout_name));
    }
  } catch (...) {
    meeting->is_given_up = true;
    throw;
  }
  if (meeting->error) std::rethrow_exception(meeting->error);
  return meeting->comm;
}

}  // namespace

void throw_nccl_error(ncclResult_t result, const std::string& doing) {
  throw CommError(concat("NCCL failed at ", doing, ": ", ncclGetErrorString(result), " (",
                         ncclGetLastError(nullptr), ")"));
}

ncclComm_t meet_over_nccl(const ncclUniqueId& id, Communicator& hosts, c10::Device device,
                          const CommOptions& options) {
  const auto meeting = std::make_shared<Meeting>();
  const Place place{id, hosts.rank(), hosts.size(), device};
  std::thread([meeting, place] { run(meeting, place); }).detach();
  return wait_for(meeting, hosts, options);
}

}  // namespace fsdp
