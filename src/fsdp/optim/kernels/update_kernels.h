// The fused updates, in which every byte of a span is read once and written once: on host memory,
// and in a CUDA device's memory.
#pragma once

#include <cstdint>

#include "fsdp/base/dtype.h"
#include "fsdp/optim/kernels/update_math.h"
#include "fsdp/optim/kernels/update_span.h"

namespace fsdp {

// --- on host memory ------------------------------------------------------------------------------

// Elements [begin, end) of a span.
struct ElementRange {
  int64_t begin = 0;
  int64_t end = 0;
};

// Piece `index` of `count` pieces of a span, which threads may update at the same time: their inner
// ends do not cut a block of scales. Pieces may be empty.
ElementRange piece_of_span(const UpdateSpan& span, int64_t index, int64_t count);

// One step on elements of the span, after begin_step(). Inner ends of ranges must be as
// piece_of_span cuts them. Any cuts give the same bits; so do the kernels for devices.
void adamw_on_cpu(const UpdateSpan& span, const AdamWRule& rule, const StepState& state,
                  ElementRange range);
void sgd_on_cpu(const UpdateSpan& span, const SgdRule& rule, const StepState& state,
                ElementRange range);

// The sum of the squares of fp32, bf16 or fp16 numbers; finite if and only if all of them are.
// Gives the same bits for the same array, but other bits for other cuts.
double squared_sum_on_cpu(const void* values, DType dtype, int64_t numel);

// Adds the sums of squares of blocks of kExactBlock numbers to the digits of an ExactSum. Any cuts
// between blocks give the same digits.
void add_exact_squares_on_cpu(const void* values, DType dtype, int64_t numel, int64_t* digits);

// --- on a device ---------------------------------------------------------------------------------

// These enqueue on a stream (a cudaStream_t) and never wait. In builds without CUDA they throw an
// Error.

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

// Adds as on the CPU, but the numbers of a block in another order.
void add_exact_squares_on_device(const void* values, DType dtype, int64_t numel, int64_t* digits,
                                 void* stream);

}  // namespace fsdp
