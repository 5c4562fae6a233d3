// Stands in for the CUDA kernel where it is not built.
#include "fsdp/base/error.h"
#include "fsdp/comm/sum_on_device.h"

namespace fsdp {

bool has_device_sums() { return false; }

bool is_summed_on_device(DType) { return false; }

int64_t device_sum_workspace_bytes() { return 0; }

void sum_on_device(const DeviceSum&, void*) {
  throw Error(
      "gradients on a CUDA device are to be summed and this build has no CUDA kernels: "
      "build with FSDP_CUDA=ON");
}

}  // namespace fsdp
