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

// One column after the other, each over all owners, so that the busiest of them so far has as
// little as possible. No owner has more than the mean and one cost in the end.
ColumnOwners deal_in_order(std::span<const CostColumn> columns, int64_t num_owners);

// All columns together. Those of a group, which follow one another in `columns`, may lie in its
// buffer in any order, so of the owners of two such columns only the last of one and the first of
// the other may be the same. The busiest owner has no more than if groups were dealt in order.
//
// Nobody has more of a group than the mean of it or its largest cost unless that is needed: its
// reduction takes as long as that of its largest share.
ColumnOwners balance_columns(std::span<const CostColumn> columns, int64_t num_owners);

}  // namespace fsdp
