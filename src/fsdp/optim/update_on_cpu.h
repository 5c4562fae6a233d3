// The fused updates on host memory: every byte of a span is read once and written once.
#pragma once

#include <cstdint>

#include "fsdp/base/dtype.h"
#include "fsdp/optim/step_state.h"
#include "fsdp/optim/update_rules.h"
#include "fsdp/optim/update_span.h"

namespace fsdp {

// Elements [begin, end) of a span.
struct ElementRange {
  int64_t begin = 0;
  int64_t end = 0;
};

// Piece `index` of `count` pieces of a span that several threads may update at the same time: their
// inner ends do not cut a block of scales. Pieces may be empty.
ElementRange piece_of_span(const UpdateSpan& span, int64_t index, int64_t count);

// One step, on elements of the span, after begin_step(). Inner ends of ranges as piece_of_span cuts
// them. Any way to cut gives the same bits; so do the kernels for devices.
void adamw_on_cpu(const UpdateSpan& span, const AdamWRule& rule, const StepState& state,
                  ElementRange range);
void sgd_on_cpu(const UpdateSpan& span, const SgdRule& rule, const StepState& state,
                ElementRange range);

// The sum of the squares of fp32, bf16 or fp16 numbers; not finite if and only if one of them is
// not. The same bits for the same array, not for another way to cut it.
double squared_sum_on_cpu(const void* values, DType dtype, int64_t numel);

}  // namespace fsdp
