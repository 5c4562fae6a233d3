// The needs of every start of a kernel.
#pragma once

#include <cuda_runtime.h>

#include "fsdp/base/check.h"

namespace fsdp {

inline cudaStream_t cuda_stream(void* stream) { return static_cast<cudaStream_t>(stream); }

inline void check_call(cudaError_t error, const char* call) {
  FSDP_CHECK(error == cudaSuccess, call, " failed: ", cudaGetErrorString(error));
}

// Throws for a launch that failed. Errors of running kernels appear later, when somebody waits.
inline void check_launch(const char* kernel) {
  const cudaError_t error = cudaGetLastError();
  FSDP_CHECK(error == cudaSuccess, "the kernel '", kernel,
             "' could not be started: ", cudaGetErrorString(error));
}

}  // namespace fsdp
