// Stands in for the CUDA kernel in builds without it.
#include "fsdp/base/error.h"
#include "fsdp/shard/group/pack_on_device.h"

namespace fsdp {

bool has_device_packs() { return false; }

bool is_packed_on_device(DType) { return false; }

void pack_on_device(std::span<const PackedTensor>, DType, float, void*) {
  throw Error(
      "tensors are to be packed on a CUDA device and this build has no CUDA kernels: build with "
      "FSDP_CUDA=ON, or keep the model on the CPU");
}

}  // namespace fsdp
