// The memory that one NCCL communicator may use in place, and which operations do.
#pragma once

#include <nccl.h>

#include <cstdint>
#include <initializer_list>
#include <map>
#include <string>

#include "fsdp/comm/comm_options.h"
#include "fsdp/comm/communicator.h"
#include "fsdp/comm/nccl/nccl_handle.h"

namespace fsdp {

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
