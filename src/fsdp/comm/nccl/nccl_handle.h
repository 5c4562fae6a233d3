// One NCCL communicator: made, asked for errors, ended. Everything about it that can fail or hang
// fails with words.
#pragma once

#include <ATen/core/Tensor.h>
#include <nccl.h>

#include <atomic>
#include <cstdint>
#include <initializer_list>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "fsdp/comm/backends.h"
#include "fsdp/comm/comm_options.h"
#include "fsdp/comm/communicator.h"

namespace fsdp {

// In NCCL's blocking mode, in which a launch is a few microseconds of the caller's thread: the
// other mode hands every launch over to a new thread. What a launch could wait for, the connections
// to the other ranks, is there before the first one.
//
// Thread-safe: another thread may abort().
class NcclHandle {
 public:
  // Collective: every rank of `hosts` calls it, with rank 0's id. A TimeoutError when not all of
  // them come, or another rank's failure. `peers`: whom ncclSend() and ncclRecv() will name; each
  // of them names this rank.
  NcclHandle(const ncclUniqueId& id, Communicator& hosts, c10::Device device,
             const CommOptions& options, std::vector<int> peers);
  ~NcclHandle();
  NcclHandle(const NcclHandle&) = delete;
  NcclHandle& operator=(const NcclHandle&) = delete;

  static ncclUniqueId new_id();

  // Runs `calls`, some NCCL calls on this communicator that belong together and are launched
  // together; it returns the first error among them. A CommError that names the operation.
  template <typename Calls>
  void launch(const Fingerprint& operation, const Calls& calls) {
    const std::lock_guard lock(launching_);
    begin_group(operation);
    const ncclResult_t called = calls(comm_);
    const ncclResult_t launched = ncclGroupEnd();
    check(called != ncclSuccess ? called : launched, operation);
  }

  // Runs one call that is no operation and returns its result; ncclInvalidUsage after abort().
  template <typename Call>
  ncclResult_t call(const Call& call) {
    const std::lock_guard lock(launching_);
    return is_ended_ ? ncclInvalidUsage : call(comm_);
  }

  // NCCL's words if it has met an error since; "" if not.
  std::string error();

  // Ends everything that is under way, on the device, too.
  void abort() noexcept;

 private:
  void begin_group(const Fingerprint& operation) const;
  static void check(ncclResult_t result, const Fingerprint& operation);

  const std::string name_;
  std::atomic<bool> is_ended_{false};  // by abort()
  std::timed_mutex launching_;         // held to use the member below
  ncclComm_t comm_ = nullptr;
};

// The type in which NCCL moves the tensor's elements; it is not asked to add any that it has not.
ncclDataType_t nccl_type(at::ScalarType type);

// The memory that one NCCL communicator may use in place, and which operations do.
class NcclBuffers {
 public:
  explicit NcclBuffers(NcclHandle& handle) : handle_(handle) {}

  // Why NCCL cannot use any memory like that; "" if it can.
  static std::string obstacle_to(UserBuffers use);

  // Registers memory from nccl_allocate() and says why that failed, or "". Symmetric: collective.
  std::string add(void* address, int64_t bytes, UserBuffers use);

  // Ends a registration. No operation may use the memory any more.
  void release(void* address) noexcept;

  // An operation is about to use these pieces, at best as `best` says; counted once something is
  // registered.
  struct Used {
    const void* address;
    int64_t bytes;
  };
  void note(OpKind kind, UserBuffers best, std::initializer_list<Used> pieces);
  const UsedBuffers& in_use() const { return in_use_; }

 private:
  struct Registration {
    ncclWindow_t window = nullptr;
    void* handle = nullptr;
    int64_t bytes = 0;
    UserBuffers use = UserBuffers::kOff;
  };
  // How NCCL may use the piece: the worst of all its bytes.
  UserBuffers use_of(const Used& piece) const;

  NcclHandle& handle_;
  std::map<const char*, Registration> entries_;  // by address
  UsedBuffers in_use_;
};

}  // namespace fsdp
