// The memory that one NCCL communicator may use in place, and which operations do.
#pragma once

#include <nccl.h>

#include <cstdint>
#include <initializer_list>
#include <map>
#include <string>

#include "fsdp/comm/communicator.h"
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

  // An operation is about to use these pieces, at best as `best` says; counted once something is
  // registered.
  struct Used {
    const void* address;
    int64_t bytes;
  };
  void note(OpKind kind, UserBuffers best, std::initializer_list<Used> pieces);
  const UsedBuffers& in_use() const { return in_use_; }

 private:
  struct Entry {
    ncclWindow_t window = nullptr;
    void* handle = nullptr;
    int64_t bytes = 0;
    UserBuffers use = UserBuffers::kOff;
  };
  // As what it knows all of these bytes.
  UserBuffers use_of(const Used& piece) const;

  NcclHandle& handle_;
  std::map<const char*, Entry> entries_;  // by address
  UsedBuffers in_use_;
};

}  // namespace fsdp
