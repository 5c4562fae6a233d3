// The one place where values of several ranks become one: on the CPU, and on a device the same
// values, added in the same order.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>

#include <cstdint>
#include <span>
#include <string_view>

#include "fsdp/comm/operation.h"
#include "fsdp/comm/reduce/sum_order.h"

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

// The type of groups' results on their way: that of accumulation. Whole numbers keep their own, in
// which sums wrap around alike.
at::ScalarType type_between_hops(const Reduction& reduction, at::ScalarType wire);

// A reduction in two hops: in groups first, to type_between_hops(); then of their results, to the
// output. Together they are the reduction of `ranks` inputs.
struct ReductionHops {
  Reduction within_group;
  Reduction across_groups;
};
ReductionHops hops_of(const Reduction& reduction, size_t ranks);

// One range of elements: what every rank contributes, and where the result goes.
struct ReduceRange {
  std::span<const void* const> inputs;  // one per rank, in rank order
  void* output = nullptr;
  int64_t numel = 0;
  ReduceTypes types;
  size_t group = 0;  // SumOrder::group; 0: one group
};

// output[i] = scale * (inputs[0][i] op inputs[1][i] op ...), in SumOrder, or that added to
// output[i], in the accumulation type, rounded once when stored; `reduction.nonfinite` is watched
// in the same pass.
// `output` may be one of the inputs if their types are equal and it is written, not added to. NaN
// wins every max and min, as in libtorch. `reduction` comes from checked_reduction.
void reduce_ranks(const ReduceRange& range, const Reduction& reduction);

// Enqueues, on the current stream, output = the inputs, one per rank, reduced as `reduction` says
// (one from checked_reduction), in groups as ReduceRange::group says. `workspace` is kept for the
// caller's next reduction on the same stream. Sums of gradient types are one kernel; other
// reductions are libtorch's.
void reduce_on_device(std::span<const at::Tensor> inputs, const Reduction& reduction,
                      const at::Tensor& output, at::Tensor& workspace, size_t group = 0);

// The reduction of `rows`, one per rank, in a launch or two however many there are, where types are
// equal and the accumulation is in theirs (sums), and of all maxima and minima.
void reduce_rows_on_device(const at::Tensor& rows, const Reduction& reduction,
                           const SumOrder& order, const at::Tensor& output, at::Tensor& workspace);

// Reduces inputs of type `wire` that are known by their addresses; false, and nothing is
// enqueued, when one kernel cannot do it.
bool reduce_in_one_kernel(std::span<const void* const> inputs, at::ScalarType wire,
                          const Reduction& reduction, const at::Tensor& output,
                          at::Tensor& workspace);

}  // namespace fsdp
