#include "fsdp/comm/nccl_handle.h"

#include <chrono>
#include <utility>

#include "fsdp/base/log.h"
#include "fsdp/comm/comm_error.h"
#include "fsdp/comm/message_transport.h"

namespace fsdp {

namespace {

using Clock = std::chrono::steady_clock;

}  // namespace

void check_nccl(ncclResult_t result, const std::string& doing) {
  if (result == ncclSuccess) return;
  throw CommError(concat("NCCL failed at ", doing, ": ", ncclGetErrorString(result), " (",
                         ncclGetLastError(nullptr), ")"));
}

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
  check_nccl(ncclGetUniqueId(&id), "ncclGetUniqueId");
  return id;
}

NcclHandle::NcclHandle(const ncclUniqueId& id, int rank, int size, std::string name,
                       const CommOptions& options)
    : name_(std::move(name)), timeout_seconds_(options.timeout_seconds) {
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  config.blocking = 0;
  const std::string doing = concat("the meeting of the ", size, " ranks of '", name_, "'");
  const ncclResult_t begun = ncclCommInitRankConfig(&comm_, size, id, rank, &config);
  try {
    check_nccl(settled(begun, doing), doing);
  } catch (...) {
    abort();
    throw;
  }
}

NcclHandle::~NcclHandle() {
  if (is_aborted_ || comm_ == nullptr) return;
  // Waits for what is under way; a rank that never comes ends it by its deadline.
  try {
    settled(ncclCommFinalize(comm_), "the end of '" + name_ + "'");
  } catch (const std::exception& error) {
    log(LogLevel::kDebug, error.what());
  }
  ncclCommDestroy(comm_);
}

ncclResult_t NcclHandle::settled(ncclResult_t result, const std::string& doing) const {
  if (result != ncclInProgress) return result;
  const auto deadline = Clock::now() + std::chrono::duration<double>(timeout_seconds_);
  Backoff backoff;
  ncclResult_t state = ncclInProgress;
  while (true) {
    const ncclResult_t asked = ncclCommGetAsyncError(comm_, &state);
    if (asked != ncclSuccess) return asked;
    if (state != ncclInProgress) return state;
    if (Clock::now() > deadline)
      throw TimeoutError(concat("not all ranks came within ", timeout_seconds_, " s to ", doing,
                                ": a rank is gone, is stuck, or cannot be reached by NCCL "
                                "(NCCL_DEBUG=INFO shows its network)"));
    backoff.pause();
  }
}

void NcclHandle::launch(const std::string& doing, const std::function<void(ncclComm_t)>& calls) {
  const std::lock_guard lock(mutex_);
  if (is_aborted_) throw CommError(concat("'", name_, "' was ended before ", doing));
  check_nccl(ncclGroupStart(), doing);
  try {
    calls(comm_);
  } catch (...) {
    (void)ncclGroupEnd();
    throw;
  }
  check_nccl(settled(ncclGroupEnd(), doing), doing);
}

std::string NcclHandle::error() {
  const std::lock_guard lock(mutex_);
  if (is_aborted_ || comm_ == nullptr) return "";
  ncclResult_t state = ncclSuccess;
  const ncclResult_t asked = ncclCommGetAsyncError(comm_, &state);
  if (asked != ncclSuccess) state = asked;
  if (state == ncclSuccess || state == ncclInProgress) return "";
  return concat(ncclGetErrorString(state), " (", ncclGetLastError(comm_), ")");
}

void NcclHandle::abort() noexcept {
  const std::lock_guard lock(mutex_);
  if (std::exchange(is_aborted_, true) || comm_ == nullptr) return;
  ncclCommAbort(comm_);
  comm_ = nullptr;
}

}  // namespace fsdp
