#include "fsdp/comm/nccl/nccl_buffers.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <iterator>

#include "fsdp/base/text.h"
#include "fsdp/comm/backends.h"

namespace fsdp {

namespace {

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
