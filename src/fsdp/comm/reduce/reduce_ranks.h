// The one place where values of several ranks become one, on the CPU.
#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <span>
#include <string_view>

#include "fsdp/comm/operation.h"

namespace fsdp {

struct ReduceTypes {
  at::ScalarType wire;    // of the inputs
  at::ScalarType result;  // of the output
};

// The reduction with its accumulation type filled in, or an Error when the types or the reduction
// are not supported ("cannot sum Float8_e4m3fn ...").
Reduction checked_reduction(const Reduction& reduction, const ReduceTypes& types,
                            std::string_view tag);

// The factor the combined value is multiplied by: the reduction's scale, over the ranks for kAvg.
double scale_of(const Reduction& reduction, size_t ranks);

// One range of elements: what every rank contributes, and where the result goes.
struct ReduceRange {
  std::span<const void* const> inputs;  // one per rank, in rank order
  void* output = nullptr;
  int64_t numel = 0;
  ReduceTypes types;
};

// output[i] = scale * (inputs[0][i] op inputs[1][i] op ...), or that added to output[i], in the
// accumulation type, rounded once when stored; `reduction.nonfinite` is watched in the same pass.
// `output` may be one of the inputs if their types are equal and it is written, not added to. NaN
// wins every max and min, as in libtorch. `reduction` comes from checked_reduction.
void reduce_ranks(const ReduceRange& range, const Reduction& reduction);

}  // namespace fsdp
