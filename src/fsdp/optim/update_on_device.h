// The fused updates on a CUDA device's memory: enqueued on a stream (a cudaStream_t), never waited
// for. In builds without CUDA every function throws an Error.
#pragma once

#include <cstdint>

#include "fsdp/base/dtype.h"
#include "fsdp/optim/step_state.h"
#include "fsdp/optim/update_rules.h"
#include "fsdp/optim/update_span.h"

namespace fsdp {

// Whether this build has them.
bool has_device_updates();

// All pointers, of the span and of the state, are device memory of the current device.
void begin_step_on_device(StepState* state, const StepRule& rule, void* stream);
void adamw_on_device(const UpdateSpan& span, const AdamWRule& rule, const StepState* state,
                     void* stream);
void sgd_on_device(const UpdateSpan& span, const SgdRule& rule, const StepState* state,
                   void* stream);

// Doubles that squared_sum_on_device needs to work in.
int64_t squared_sum_workspace_numel();

// Adds the sum of the squares of fp32, bf16 or fp16 numbers to *sum. The same bits in every run.
void squared_sum_on_device(const void* values, DType dtype, int64_t numel, double* sum,
                           double* workspace, void* stream);

// join_weights and split_weights (split_weight.h) on device memory.
void join_weights_on_device(const void* weight, const int16_t* remainder, float* joined,
                            int64_t numel, void* stream);
void split_weights_on_device(const float* joined, void* weight, int16_t* remainder, int64_t numel,
                             void* stream);

}  // namespace fsdp
