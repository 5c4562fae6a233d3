// One NCCL communicator: made, asked for errors, ended. Everything about it that can fail or hang
// fails with words.
#pragma once

#include <ATen/core/Tensor.h>
#include <nccl.h>

#include <functional>
#include <mutex>
#include <string>

#include "fsdp/comm/comm_options.h"

namespace fsdp {

// Calls do not block: NCCL goes on by itself, and whoever needs the result asks until it is there,
// at most until the deadline. Thread-safe: another thread may abort().
class NcclHandle {
 public:
  // Collective: every rank of `name` calls it with rank 0's id.
  NcclHandle(const ncclUniqueId& id, int rank, int size, std::string name,
             const CommOptions& options);
  ~NcclHandle();
  NcclHandle(const NcclHandle&) = delete;
  NcclHandle& operator=(const NcclHandle&) = delete;

  static ncclUniqueId new_id();

  // Runs `calls`, some NCCL calls on this communicator that belong together, and returns when they
  // are on their stream. A CommError that names `doing` when one fails.
  void launch(const std::string& doing, const std::function<void(ncclComm_t)>& calls);

  // NCCL's words if it has met an error since; "" if not.
  std::string error();

  // Ends everything that is under way, on the device, too.
  void abort() noexcept;

 private:
  ncclResult_t settled(ncclResult_t result, const std::string& doing) const;

  const std::string name_;
  const double timeout_seconds_;
  std::mutex mutex_;  // protects the members below
  ncclComm_t comm_ = nullptr;
  bool is_aborted_ = false;
};

// Throws a CommError with NCCL's words.
void check_nccl(ncclResult_t result, const std::string& doing);

// The type in which NCCL moves the tensor's elements; it is not asked to add any that it has not.
ncclDataType_t nccl_type(at::ScalarType type);

}  // namespace fsdp
