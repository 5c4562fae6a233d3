// Linear layers whose inputs come from other ranks, or whose rows are in groups with a matrix each.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <initializer_list>
#include <vector>

#include "fsdp/nn/layers/linear.h"

namespace fsdp {
class MeshAxis;
}

namespace fsdp::nn {

// Projections of a sequence whose tokens the ranks of a tp group share: each computes some outputs,
// of all tokens. own: this rank's tokens, [batch, sequence / tp, in]; weights: [outputs of this
// rank, in]; biases: one for each, undefined where there is none. Results: [batch, sequence,
// outputs].
//
// Keeps the own tokens for the backward, which gathers the others again, and computes gradients of
// the weights while the tokens' travels. Under quantised weights with scales of rows, codes of
// tokens are kept and travel, with a scale per token; else numbers do.
std::vector<at::Tensor> gathered_linear(const at::Tensor& own,
                                        const std::vector<at::Tensor>& weights,
                                        const std::vector<at::Tensor>& biases, const MeshAxis& tp);

// --- rows in groups: the layers of experts -------------------------------------------------------

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
