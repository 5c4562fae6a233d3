#include "fsdp/comm/nccl/nccl_handle.h"

#include <ATen/ATen.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime_api.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <future>
#include <iterator>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>

#include "fsdp/base/log.h"
#include "fsdp/base/text.h"
#include "fsdp/comm/backends.h"
#include "fsdp/comm/comm_error.h"

namespace fsdp {

namespace {

using Clock = std::chrono::steady_clock;
constexpr std::chrono::milliseconds kBetweenMeetingLooks{50};

// A CommError with NCCL's words, that names what failed.
[[noreturn]] void throw_nccl_error(ncclResult_t result, const std::string& doing) {
  throw CommError(concat("NCCL failed at ", doing, ": ", ncclGetErrorString(result), " (",
                         ncclGetLastError(nullptr), ")"));
}

struct NcclPlace {
  ncclUniqueId id;
  int rank;
  int size;
  c10::Device device;
  std::vector<int> peers;
};

// The thread of the meeting and the thread that waits for it share this.
struct NcclMeeting {
  std::mutex mutex;  // protects the members below
  std::condition_variable changed;
  bool is_over = false;
  bool is_cancelled = false;
  ncclComm_t comm = nullptr;
  std::exception_ptr error;
};

// The first message between two ranks makes their connection, for which both must be there. One
// letter to every peer, so that no later launch is the first; and to no other rank, because a
// connection on one host takes hundreds of megabytes (plan/network.cpp).
void exchange_letters(ncclComm_t comm, const NcclPlace& place) {
  if (place.peers.empty()) return;
  const c10::cuda::CUDAStream stream =
      c10::cuda::getStreamFromPool(/*isHighPriority=*/false, place.device.index());
  const c10::cuda::CUDAStreamGuard guard(stream);
  const at::Tensor letters = at::zeros({2, place.size}, at::device(place.device).dtype(at::kByte));
  auto* sent = letters.mutable_data_ptr<uint8_t>();
  auto* received = sent + place.size;
  ncclResult_t result = ncclGroupStart();
  for (const int peer : place.peers) {
    if (result != ncclSuccess) break;
    result = ncclSend(sent + peer, 1, ncclUint8, peer, comm, stream);
    if (result == ncclSuccess) result = ncclRecv(received + peer, 1, ncclUint8, peer, comm, stream);
  }
  const ncclResult_t launched = ncclGroupEnd();
  if (result == ncclSuccess) result = launched;
  if (result != ncclSuccess) throw_nccl_error(result, "the first message to every peer");
  stream.synchronize();
}

ncclComm_t meet(const NcclPlace& place) {
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

void hold_meeting(const std::shared_ptr<NcclMeeting>& meeting, const NcclPlace& place) {
  ncclComm_t comm = nullptr;
  std::exception_ptr error;
  try {
    comm = meet(place);
  } catch (...) {
    error = std::current_exception();
  }
  const std::lock_guard lock(meeting->mutex);
  if (meeting->is_cancelled && comm != nullptr) ncclCommAbort(comm);
  meeting->comm = comm;
  meeting->error = error;
  meeting->is_over = true;
  meeting->changed.notify_all();
}

// Note [Why a meeting has a thread]
// ncclCommInitRankConfig waits for the other ranks, and in blocking mode nothing ends that. So it
// waits in a thread of its own, which is left behind when the time is up: it keeps what it uses,
// and ends the communicator should it be made after all.
ncclComm_t await_meeting(const std::shared_ptr<NcclMeeting>& meeting, Communicator& hosts,
                         const CommOptions& options) {
  const auto deadline = Clock::now() + std::chrono::duration<double>(options.timeout_seconds);
  std::unique_lock lock(meeting->mutex);
  try {
    while (
        !meeting->changed.wait_for(lock, kBetweenMeetingLooks, [&] { return meeting->is_over; })) {
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
    meeting->is_cancelled = true;
    throw;
  }
  if (meeting->error) std::rethrow_exception(meeting->error);
  return meeting->comm;
}

// The longest that a launch takes when it does not wait for another rank.
constexpr std::chrono::seconds kLongestLaunch{1};
// The longest that the end of a communicator takes: NCCL closes connections and waits for its
// threads and kernels.
constexpr std::chrono::seconds kLongestEnd{10};

// A communicator of the ranks of `hosts`, connected to its peers, so that later launches wait for
// nobody. A TimeoutError when one does not come within the deadline; another rank's failure as soon
// as it is known. Every rank calls it, with rank 0's id.
ncclComm_t meet_over_nccl(const ncclUniqueId& id, Communicator& hosts, c10::Device device,
                          const CommOptions& options, std::vector<int> peers) {
  const auto meeting = std::make_shared<NcclMeeting>();
  const NcclPlace place{id, hosts.rank(), hosts.size(), device, std::move(peers)};
  std::thread([meeting, place] { hold_meeting(meeting, place); }).detach();
  return await_meeting(meeting, hosts, options);
}

// The first version whose windows are symmetric.
constexpr int kFirstWithWindows = NCCL_VERSION(2, 27, 0);

// Smaller pieces (norms, flags) travel inside NCCL's own messages and are not counted.
constexpr int64_t kUncountedBytes = 1 << 10;

// Where ranks cannot reach each other's memory NCCL answers with the handle of an ordinary
// registration instead, which is the host's; a window's is on the device.
bool is_symmetric(ncclWindow_t window) {
  cudaPointerAttributes place{};
  const bool is_known = cudaPointerGetAttributes(&place, window) == cudaSuccess;
  (void)cudaGetLastError();
  return is_known && place.type == cudaMemoryTypeDevice;
}

}  // namespace

ncclDataType_t nccl_type(at::ScalarType type) {
  switch (c10::elementSize(type)) {
    case 2:
      return type == at::kBFloat16 ? ncclBfloat16 : ncclFloat16;
    case 4:
      return type == at::kFloat ? ncclFloat32 : ncclInt32;
    case 8:
      return type == at::kDouble ? ncclFloat64 : ncclInt64;
    default:
      return ncclUint8;
  }
}

ncclUniqueId NcclHandle::new_id() {
  ncclUniqueId id;
  if (const ncclResult_t result = ncclGetUniqueId(&id); result != ncclSuccess)
    throw_nccl_error(result, "ncclGetUniqueId");
  return id;
}

NcclHandle::NcclHandle(const ncclUniqueId& id, Communicator& hosts, c10::Device device,
                       const CommOptions& options, std::vector<int> peers)
    : name_(hosts.name()), comm_(meet_over_nccl(id, hosts, device, options, std::move(peers))) {}

NcclHandle::~NcclHandle() {
  if (is_ended_) return;
  const ncclResult_t flushed = ncclCommFinalize(comm_);
  if (flushed != ncclSuccess)
    log(LogLevel::kDebug, "the end of '", name_, "': ", ncclGetErrorString(flushed));
  ncclCommDestroy(comm_);
}

void NcclHandle::begin_group(const Fingerprint& operation) const {
  if (is_ended_) throw CommError(concat("'", name_, "' was ended before ", operation.text()));
  check(ncclGroupStart(), operation);
}

void NcclHandle::check(ncclResult_t result, const Fingerprint& operation) {
  if (result != ncclSuccess) throw_nccl_error(result, operation.text());
}

std::string NcclHandle::error() {
  const std::unique_lock lock(launching_, std::try_to_lock);
  if (!lock || is_ended_) return "";  // busy: the next time
  ncclResult_t state = ncclSuccess;
  const ncclResult_t asked = ncclCommGetAsyncError(comm_, &state);
  if (asked != ncclSuccess) state = asked;
  if (state == ncclSuccess || state == ncclInProgress) return "";
  return concat(ncclGetErrorString(state), " (", ncclGetLastError(comm_), ")");
}

// A launch may be stuck: a device takes a limited number of launches while a kernel waits for a
// rank that is gone. NCCL's memory must not be released before that launch has returned, so the
// kernel is ended first.
void NcclHandle::abort() noexcept {
  if (is_ended_.exchange(true)) return;
  std::unique_lock lock(launching_, kLongestLaunch);
#ifdef NCCL_REVOKE_DEFAULT
  if (!lock) {
    ncclCommRevoke(comm_, NCCL_REVOKE_DEFAULT);
    static_cast<void>(lock.try_lock_for(kLongestLaunch));
  }
#endif
  if (!lock) log(LogLevel::kWarning, "a launch of '", name_, "' does not come back from NCCL");
  // In a thread of its own, which is left behind if NCCL itself waits for a rank that is gone: the
  // caller must return, so that its error is heard.
  std::promise<void> ended;
  const std::future<void> end = ended.get_future();
  std::thread([comm = comm_, done = std::move(ended)]() mutable {
    ncclCommAbort(comm);
    done.set_value();
  }).detach();
  if (end.wait_for(kLongestEnd) != std::future_status::ready)
    log(LogLevel::kWarning, "NCCL has not ended '", name_, "' within ", kLongestEnd.count(),
        " s; it is left as it is");
}

std::string NcclBuffers::obstacle_to(UserBuffers use) {
  int version = 0;
  if (use != UserBuffers::kSymmetric) return "";
  if (NCCL_VERSION_CODE >= kFirstWithWindows && ncclGetVersion(&version) == ncclSuccess &&
      version >= kFirstWithWindows)
    return "";
  return concat("NCCL ", nccl_version(), " has no symmetric windows, 2.27 has");
}

std::string NcclBuffers::add(void* address, int64_t bytes, UserBuffers use) {
  const auto size = static_cast<size_t>(bytes);
  Registration entry{.bytes = bytes, .use = use};
  ncclResult_t result = ncclSuccess;
  if (use == UserBuffers::kSymmetric) {
#ifdef NCCL_WIN_COLL_SYMMETRIC
    result = handle_.call([&](ncclComm_t comm) {
      return ncclCommWindowRegister(comm, address, size, &entry.window, NCCL_WIN_COLL_SYMMETRIC);
    });
#endif
  } else {
    result = handle_.call(
        [&](ncclComm_t comm) { return ncclCommRegister(comm, address, size, &entry.handle); });
  }
  const char* call = use == UserBuffers::kSymmetric ? "ncclCommWindowRegister" : "ncclCommRegister";
  if (result != ncclSuccess)
    return concat(call, ": ", ncclGetErrorString(result), " (", ncclGetLastError(nullptr), ")");
  // Where these GPUs, or the user's variables, do not allow it.
  if (entry.window == nullptr && entry.handle == nullptr) return concat(call, " does nothing here");
  entries_.emplace(static_cast<const char*>(address), entry);
  in_use_.clear();  // counted anew, since more memory is registered now
  if (entry.window != nullptr && !is_symmetric(entry.window))
    return "the ranks' GPUs do not reach each other's memory";
  return "";
}

void NcclBuffers::release(void* address) noexcept {
  const auto found = entries_.find(static_cast<const char*>(address));
  if (found == entries_.end()) return;
  const Registration entry = found->second;
  entries_.erase(found);
  // Fails only after abort(), which has freed it.
  static_cast<void>(handle_.call([&](ncclComm_t comm) {
#ifdef NCCL_WIN_COLL_SYMMETRIC
    if (entry.window != nullptr) return ncclCommWindowDeregister(comm, entry.window);
#endif
    return ncclCommDeregister(comm, entry.handle);
  }));
}

UserBuffers NcclBuffers::use_of(const Used& piece) const {
  const auto* begin = static_cast<const char*>(piece.address);
  const auto after = entries_.upper_bound(begin);
  if (after == entries_.begin()) return UserBuffers::kOff;
  const auto& [address, entry] = *std::prev(after);
  return begin + piece.bytes <= address + entry.bytes ? entry.use : UserBuffers::kOff;
}

void NcclBuffers::note(OpKind kind, UserBuffers best, std::initializer_list<Used> pieces) {
  if (entries_.empty()) return;
  int64_t num_bytes = 0;
  for (const Used& piece : pieces) {
    num_bytes += piece.bytes;
    if (piece.bytes > 0) best = std::min(best, use_of(piece));
  }
  if (num_bytes < kUncountedBytes) return;
  const auto [known, is_new] = in_use_.try_emplace(kind, best);
  if (!is_new) known->second = std::min(known->second, best);
}

}  // namespace fsdp
