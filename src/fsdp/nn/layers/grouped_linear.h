// Products of rows in groups, each with a matrix of its own: the layers of experts.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace fsdp::nn {

struct RowGroups {
  at::Tensor ends;  // [groups], int32, on the rows' device; rows behind the last end are nobody's
  at::Tensor on_host;  // the same for the host; undefined if the device multiplies all groups
};

// Waits for the device only where it cannot multiply rows of `widths` numbers by groups itself.
RowGroups row_groups(const at::Tensor& rows, const at::Tensor& ends,
                     std::initializer_list<int64_t> widths);

// The rows of group g times the transpose of weight[g]. rows: [n, in]; weight: [groups * out, in],
// matrix after matrix. Rows that are nobody's have no result and no gradient: whatever their memory
// holds. On a device that multiplies all groups at once, a weight's gradient is rounded to the
// weight's type before it is summed. A quantised weight is multiplied by its numbers, which are
// made anew for every product.
at::Tensor grouped_linear(const at::Tensor& rows, const at::Tensor& weight,
                          const RowGroups& groups);

}  // namespace fsdp::nn
