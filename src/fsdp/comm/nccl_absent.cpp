// Builds without NCCL.
#include "fsdp/base/error.h"
#include "fsdp/comm/connect_nccl.h"

namespace fsdp {

bool nccl_available() { return false; }

std::string nccl_version() { return ""; }

void* nccl_allocate(int64_t bytes) {
  throw Error(concat("NCCL is to allocate ", bytes_text(static_cast<double>(bytes)),
                     ", but this build has no NCCL: build with the preset 'cuda' where nccl.h is"));
}

void nccl_deallocate(void* /*address*/) noexcept {}

std::unique_ptr<Communicator> over_nccl(std::unique_ptr<Communicator>, int, const CommOptions&) {
  throw Error(
      "FSDP_NCCL is always, but this build has no NCCL: build with the preset 'cuda' where "
      "nccl.h is, or set FSDP_NCCL to auto");
}

}  // namespace fsdp
