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

// output[i] = scale * (inputs[0][i] op inputs[1][i] op ...), combined in rank order in the
// accumulation type, rounded once when stored. `output` may be one of the inputs if their types are
// equal. NaN wins every max and min, as in libtorch.
void reduce_ranks(std::span<const void* const> inputs, void* output, int64_t numel,
                  const ReduceTypes& types, const Reduction& reduction);

}  // namespace fsdp
