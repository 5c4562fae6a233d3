#include "fsdp/comm/nccl_handle.h"

#include <chrono>
#include <future>
#include <thread>
#include <utility>

#include "fsdp/base/log.h"
#include "fsdp/comm/comm_error.h"
#include "fsdp/comm/nccl_meeting.h"

namespace fsdp {

namespace {

// What a launch takes at most when nothing holds it up.
constexpr std::chrono::seconds kLongestLaunch{1};
// And an end: it closes connections and waits for NCCL's threads and kernels.
constexpr std::chrono::seconds kLongestEnd{10};

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
                       const CommOptions& options)
    : name_(hosts.name()), comm_(meet_over_nccl(id, hosts, device, options)) {}

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

// A launch may be stuck: the device takes so many and no more while a kernel waits for a rank that
// is gone. Then NCCL's memory must not go before the launch has come back, so the kernel is ended
// first.
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
  // By a thread that is left behind if NCCL itself waits for a rank that is gone: whoever gives up
  // must be heard.
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

}  // namespace fsdp
