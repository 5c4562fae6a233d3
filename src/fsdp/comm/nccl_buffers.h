// The memory that one NCCL communicator may use in place.
#pragma once

#include <nccl.h>

#include <cstdint>
#include <string>
#include <unordered_map>

#include "fsdp/comm/nccl_handle.h"
#include "fsdp/comm/user_buffers.h"

namespace fsdp {

class NcclBuffers {
 public:
  explicit NcclBuffers(NcclHandle& handle) : handle_(handle) {}

  // Why NCCL cannot use any memory like that; "" if it can.
  static std::string obstacle_to(UserBuffers use);

  // Registers memory from nccl_allocate() and says why that failed, or "". Symmetric: collective.
  std::string add(void* address, int64_t bytes, UserBuffers use);

  // Nothing may be under way there any more.
  void forget(void* address) noexcept;

 private:
  struct Entry {
    ncclWindow_t window = nullptr;
    void* handle = nullptr;
  };

  NcclHandle& handle_;
  std::unordered_map<void*, Entry> entries_;
};

}  // namespace fsdp
