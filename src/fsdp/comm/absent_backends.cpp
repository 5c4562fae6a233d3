// Stands in for the backends and kernels that this build does not have: says so in words.
#include "fsdp/base/check.h"
#include "fsdp/comm/backends.h"
#include "fsdp/comm/message/message_transport.h"
#include "fsdp/comm/reduce/sum_on_device.h"

namespace fsdp {

#if !FSDP_HAS_MPI
bool mpi_available() { return false; }

std::shared_ptr<MessageTransport> mpi_transport() { FSDP_ASSERT(false, "this build has no MPI"); }
#endif

#if !FSDP_HAS_NCCL
bool nccl_available() { return false; }

std::string nccl_version() { return ""; }

std::string nccl_gpu_id(int /*device_index*/) { return ""; }

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
#endif

#if !FSDP_HAS_CUDA_KERNELS
bool has_device_sums() { return false; }

bool is_summed_on_device(DType) { return false; }

int64_t device_sum_workspace_bytes() { return 0; }

namespace {
[[noreturn]] void refuse_sums() {
  throw Error(
      "gradients on a CUDA device are to be summed and this build has no CUDA kernels: "
      "build with FSDP_CUDA=ON");
}
}  // namespace

void sum_on_device(const DeviceSum&, void*) { refuse_sums(); }
void sum_rows_on_device(const RowSum<float>&, void*) { refuse_sums(); }
void sum_rows_on_device(const RowSum<double>&, void*) { refuse_sums(); }
#endif

}  // namespace fsdp
