#include "fsdp/comm/nccl_buffers.h"

#include "fsdp/base/text.h"
#include "fsdp/comm/connect_nccl.h"

namespace fsdp {

namespace {

// The first version whose windows are symmetric.
constexpr int kFirstWithWindows = NCCL_VERSION(2, 27, 0);

}  // namespace

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
  Entry entry;
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
  entries_.emplace(address, entry);
  return "";
}

void NcclBuffers::forget(void* address) noexcept {
  const auto found = entries_.find(address);
  if (found == entries_.end()) return;
  const Entry entry = found->second;
  entries_.erase(found);
  // Fails only after abort(), which has freed it.
  static_cast<void>(handle_.call([&](ncclComm_t comm) {
#ifdef NCCL_WIN_COLL_SYMMETRIC
    if (entry.window != nullptr) return ncclCommWindowDeregister(comm, entry.window);
#endif
    return ncclCommDeregister(comm, entry.handle);
  }));
}

}  // namespace fsdp
