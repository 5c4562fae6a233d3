// The fused updates in a CUDA device's memory: calls enqueue on a stream (a cudaStream_t) and never
// wait. In builds without CUDA every function throws an Error.
#pragma once

#include <cstdint>

#include "fsdp/base/dtype.h"
#include "fsdp/optim/kernels/begin_step.h"
#include "fsdp/optim/kernels/update_math.h"
#include "fsdp/optim/kernels/update_span.h"

namespace fsdp {

// Whether this build has the kernels.
bool has_device_updates();

// All pointers, in the span and in the state, are memory of the current device.
void begin_step_on_device(StepState* state, const StepRule& rule, void* stream);
void adamw_on_device(const UpdateSpan& span, const AdamWRule& rule, const StepState* state,
                     void* stream);
void sgd_on_device(const UpdateSpan& span, const SgdRule& rule, const StepState* state,
                   void* stream);

// The size of squared_sum_on_device's work space, in doubles.
int64_t squared_sum_workspace_numel();

// Adds the sum of the squares of fp32, bf16 or fp16 numbers to *sum. Every run gives the same bits.
void squared_sum_on_device(const void* values, DType dtype, int64_t numel, double* sum,
                           double* workspace, void* stream);

// join_weights and split_weights (split_weight.h) on device memory.
void join_weights_on_device(const void* weight, const int16_t* remainder, float* joined,
                            int64_t numel, void* stream);
void split_weights_on_device(const float* joined, void* weight, int16_t* remainder, int64_t numel,
                             void* stream);

}  // namespace fsdp
