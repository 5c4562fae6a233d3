// Stands in for the CUDA kernels in builds without them.
#include "fsdp/base/error.h"
#include "fsdp/optim/kernels/update_kernels.h"

namespace fsdp {

namespace {

[[noreturn]] void throw_absent() {
  throw Error(
      "the optimizer's state is on a CUDA device and this build has no CUDA kernels: build with "
      "FSDP_CUDA=ON, or keep the model on the CPU");
}

}  // namespace

bool has_device_updates() { return false; }

void begin_step_on_device(StepState*, const StepRule&, void*) { throw_absent(); }

void adamw_on_device(const UpdateSpan&, const AdamWRule&, const StepState*, void*) {
  throw_absent();
}

void sgd_on_device(const UpdateSpan&, const SgdRule&, const StepState*, void*) { throw_absent(); }

int64_t squared_sum_workspace_numel() { throw_absent(); }

void squared_sum_on_device(const void*, DType, int64_t, double*, double*, void*) { throw_absent(); }

void add_exact_squares_on_device(const void*, DType, int64_t, int64_t*, void*) { throw_absent(); }

}  // namespace fsdp
