// Stands in for the CUDA kernels in builds without them.
#include "fsdp/base/error.h"
#include "fsdp/nn/kernels/layer_kernels.h"

namespace fsdp::nn {

namespace {

[[noreturn]] void throw_absent() {
  throw Error("a kernel of a layer was called, and this build has none: build with FSDP_CUDA=ON");
}

}  // namespace

bool has_device_layers() { return false; }

int device_generation(int) { return 0; }

void rotate_on_device(const std::array<RotatedHeads, 2>&, const RotationShape&,
                      const RotationAngles&, void*) {
  throw_absent();
}

void gated_on_device(const GatedMemory&, void*, void*) { throw_absent(); }

void gated_backward_on_device(const GatedMemory&, const void*, void*, void*, void*) {
  throw_absent();
}

int64_t choice_block_counts(int64_t, int64_t) { throw_absent(); }

void sort_choices_on_device(const ChoiceOrder&, void*) { throw_absent(); }

void combine_on_device(const CombineMemory&, void*, void*) { throw_absent(); }

void combine_backward_on_device(const CombineMemory&, const void*, void*, void*, void*) {
  throw_absent();
}

void cross_entropy_rows_on_device(RowWork, const LogitRowsMemory&, void*) { throw_absent(); }

void cross_entropy_mean_on_device(const CrossEntropyMean&, float*, float*, void*) {
  throw_absent();
}

bool norm_fits_device(DType, int64_t) { return false; }

int64_t norm_weight_sums(int64_t) { throw_absent(); }

void rms_norm_on_device(const NormInput&, const NormOutput&, void*) { throw_absent(); }

void rms_norm_backward_on_device(const NormInput&, const NormGradients&, void*) { throw_absent(); }

int64_t num_amaxes(ScaleBlock, int64_t, int64_t) { throw_absent(); }

void quantize_on_device(std::span<const QuantizeMemory>, uint32_t*, void*) { throw_absent(); }

void transpose_bytes_on_device(const TransposeMemory&, void*) { throw_absent(); }

}  // namespace fsdp::nn
