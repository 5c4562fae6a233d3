// Costs of matrices dealt to owners so that the busiest one has little more than it must have.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace fsdp {

// What lies in one piece in the buffer of a group: its owners ascend.
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
