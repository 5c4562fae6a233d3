// Which share owns which matrix: chosen for all groups of a grid together, then laid out one by
// one.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "fsdp/layout/flat_layout.h"
#include "fsdp/layout/packing.h"

namespace fsdp {

// Sets matrix_owners of all requests with matrix_rows, which must be for the same ranks. Loads, in
// flops (newton_schulz_flops), are even over inner ranks, because with a plain strategy all outer
// ranks of one update the same; what an inner rank has of a group goes to its outer ranks in the
// order of the buffer.
void deal_matrices(std::span<FlatLayoutRequest* const> requests);

// One segment with the uneven shares that matrix_owners says; tensors lie in the order of their
// owners, which ascend within a tensor and from one tensor to the next.
Packing pack_matrices(std::span<const BrickedTensor> tensors, const FlatLayoutRequest& request);

// A part that lies in one piece in the buffer of a group: its owners ascend.
struct CostColumn {
  int64_t group = 0;
  std::vector<int64_t> costs;  // one or more, none negative
};

// The owner of each cost of each column, from 0.
using ColumnOwners = std::vector<std::vector<int64_t>>;

// Columns of a group, which follow one another in `columns`, may lie in its buffer in any order: of
// the owners of two of them only the last of one and the first of the other may be the same. No
// owner has more than the mean and one cost.
//
// Nobody has more of a group than the mean of it or its largest cost, unless the busiest owner
// would have much more: a group's reduction takes as long as that of its largest share.
ColumnOwners balance_columns(std::span<const CostColumn> columns, int64_t num_owners);

}  // namespace fsdp
