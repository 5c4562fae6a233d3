// Stands in for the CUDA kernels in builds without them.
#include "fsdp/base/error.h"
#include "fsdp/base/text.h"
#include "fsdp/shard/group/pack_on_device.h"
#include "fsdp/shard/group/quantize_part.h"

namespace fsdp {

namespace {

[[noreturn]] void throw_absent(const char* what) {
  throw Error(concat(what,
                     " on a CUDA device and this build has no CUDA kernels: build with "
                     "FSDP_CUDA=ON, or keep the model on the CPU"));
}

}  // namespace

bool has_device_packs() { return false; }

bool is_packed_on_device(DType) { return false; }

void pack_on_device(std::span<const PackedTensor>, DType, void*) {
  throw_absent("tensors are to be packed");
}

void amax_on_device(const MatrixPart&, const SharedScales&, uint32_t*, void*) {
  throw_absent("weights are to be quantised");
}

void factors_on_device(const uint32_t*, int64_t, float*, float*, void*) {
  throw_absent("weights are to be quantised");
}

void quantize_on_device(const MatrixPart&, WeightRecipe, const float*, const QuantizedPart&,
                        void*) {
  throw_absent("weights are to be quantised");
}

}  // namespace fsdp
