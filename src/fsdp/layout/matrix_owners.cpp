#include "fsdp/layout/matrix_owners.h"

#include <algorithm>
#include <compare>
#include <cstddef>
#include <map>
#include <numeric>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

#include "fsdp/base/check.h"
#include "fsdp/base/integer.h"
#include "fsdp/layout/flat_layout.h"

namespace fsdp {

namespace {

struct OwnerRange {
  int64_t first = 0;
  int64_t last = 0;

  friend auto operator<=>(const OwnerRange&, const OwnerRange&) = default;
};

int64_t sum_of(std::span<const int64_t> costs) {
  int64_t sum = 0;
  for (const int64_t cost : costs) sum = checked_add(sum, cost);
  return sum;
}

int64_t largest_of(std::span<const int64_t> costs) {
  return *std::max_element(costs.begin(), costs.end());
}

// More could not get anything.
int64_t useful_owners(std::span<const CostColumn> columns, int64_t num_owners) {
  size_t num_costs = 0;
  for (const CostColumn& column : columns) num_costs += column.costs.size();
  return std::min(num_owners, static_cast<int64_t>(num_costs));
}

void add_costs(std::span<const int64_t> costs, std::span<const int64_t> owners,
               std::span<int64_t> loads) {
  for (size_t i = 0; i < costs.size(); ++i) loads[static_cast<size_t>(owners[i])] += costs[i];
}

// Owners of the range, from the first on, take as many of the next costs as they have room for;
// none at all if they do not take all.
template <typename Room>
std::vector<int64_t> fill_owners(std::span<const int64_t> costs, OwnerRange range,
                                 const Room& room_of) {
  std::vector<int64_t> owners;
  int64_t owner = range.first;
  int64_t room = room_of(owner);
  for (const int64_t cost : costs) {
    while (cost > room) {
      if (owner == range.last) return {};
      room = room_of(++owner);
    }
    room -= cost;
    owners.push_back(owner);
  }
  return owners;
}

// Draws from the last of those owners back, so that columns of the group find more owners free.
template <typename Room>
void draw_together(std::span<const int64_t> costs, std::vector<int64_t>& owners,
                   const Room& room_of) {
  int64_t owner = owners.back();
  int64_t room = room_of(owner);
  for (size_t i = costs.size(); i-- > 0;) {
    while (costs[i] > room) room = room_of(--owner);  // ends: nobody moves to an earlier owner
    room -= costs[i];
    owners[i] = owner;
  }
}

// --- under a level -------------------------------------------------------------------------------

class LevelDeal {
 public:
  // An owner gets at most `level`, and of a group `factor` times the mean or its largest cost.
  LevelDeal(std::span<const CostColumn> columns, int64_t num_owners, int64_t level, int64_t factor)
      : columns_(columns),
        level_(level),
        loads_(static_cast<size_t>(num_owners), 0),
        groups_(static_cast<size_t>(columns.back().group) + 1),
        owners_(columns.size()) {
    for (const CostColumn& column : columns) {
      Group& group = group_of(column);
      group.loads.resize(loads_.size(), 0);
      group.total += sum_of(column.costs);
      group.most = std::max({group.most, checked_mul(factor, largest_of(column.costs)),
                             checked_mul(factor, ceil_div(group.total, num_owners))});
    }
  }

  // False if the column finds no owners with room.
  bool add(size_t index) {
    const CostColumn& column = columns_[index];
    Group& group = group_of(column);
    std::vector<int64_t> owners = least_loaded_for(column);
    for (const OwnerRange range : free_ranges(group))
      if (owners.empty()) owners = owners_in(range, column);
    if (owners.empty()) return false;
    add_costs(column.costs, owners, loads_);
    add_costs(column.costs, owners, group.loads);
    const OwnerRange taken{owners.front(), owners.back()};
    group.taken.insert(std::upper_bound(group.taken.begin(), group.taken.end(), taken), taken);
    owners_[index] = std::move(owners);
    return true;
  }

  int64_t busiest() const { return largest_of(loads_); }
  ColumnOwners& owners() { return owners_; }

 private:
  struct Group {
    int64_t total = 0;
    int64_t most = 0;               // that one owner may have of it
    std::vector<int64_t> loads;     // by owner
    std::vector<OwnerRange> taken;  // by its columns so far, in order
  };

  Group& group_of(const CostColumn& column) { return groups_[static_cast<size_t>(column.group)]; }

  auto room_in(const Group& group) const {
    return [this, &group](int64_t owner) {
      const auto i = static_cast<size_t>(owner);
      return std::min(level_ - loads_[i], group.most - group.loads[i]);
    };
  }

  std::vector<OwnerRange> free_ranges(const Group& group) const {
    std::vector<OwnerRange> ranges;
    int64_t first = 0;
    for (const OwnerRange taken : group.taken) {
      ranges.push_back({first, taken.first});
      first = taken.last;
    }
    ranges.push_back({first, static_cast<int64_t>(loads_.size()) - 1});
    return ranges;
  }

  // One owner for the whole column, which leaves most owners free for the group's others.
  std::vector<int64_t> least_loaded_for(const CostColumn& column) {
    const Group& group = group_of(column);
    const auto room_of = room_in(group);
    const int64_t sum = sum_of(column.costs);
    const auto load_of = [&](int64_t owner) {
      return std::pair(loads_[static_cast<size_t>(owner)], group.loads[static_cast<size_t>(owner)]);
    };
    std::optional<int64_t> best;
    for (const OwnerRange range : free_ranges(group))
      for (int64_t owner = range.first; owner <= range.last; ++owner)
        if (room_of(owner) >= sum && (!best || load_of(owner) < load_of(*best))) best = owner;
    if (!best) return {};
    return std::vector<int64_t>(column.costs.size(), *best);
  }

  std::vector<int64_t> owners_in(OwnerRange range, const CostColumn& column) {
    const auto room_of = room_in(group_of(column));
    std::vector<int64_t> owners = fill_owners(column.costs, range, room_of);
    if (!owners.empty()) draw_together(column.costs, owners, room_of);
    return owners;
  }

  const std::span<const CostColumn> columns_;
  const int64_t level_;
  std::vector<int64_t> loads_;
  std::vector<Group> groups_;
  ColumnOwners owners_;
};

// Those with the largest cost first, as what is small fits anywhere.
std::vector<size_t> largest_first(std::span<const CostColumn> columns) {
  std::vector<std::pair<int64_t, int64_t>> sizes;
  for (const CostColumn& column : columns)
    sizes.emplace_back(largest_of(column.costs), sum_of(column.costs));
  std::vector<size_t> order(columns.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::stable_sort(order.begin(), order.end(),
                   [&](size_t a, size_t b) { return sizes[a] > sizes[b]; });
  return order;
}

// --- in order ------------------------------------------------------------------------------------

// The columns of each group as one.
std::vector<CostColumn> one_per_group(std::span<const CostColumn> columns) {
  std::vector<CostColumn> groups;
  for (const CostColumn& column : columns) {
    if (groups.empty() || groups.back().group != column.group)
      groups.push_back({.group = column.group, .costs = {}});
    std::vector<int64_t>& costs = groups.back().costs;
    costs.insert(costs.end(), column.costs.begin(), column.costs.end());
  }
  return groups;
}

// Group after group, each over all owners, so that the busiest of them so far has as little as
// possible.
ColumnOwners deal_in_order(std::span<const CostColumn> columns, int64_t num_owners) {
  ColumnOwners owners;
  std::vector<int64_t> loads(static_cast<size_t>(num_owners), 0);
  for (const CostColumn& group : one_per_group(columns)) {
    const std::vector<int64_t>& costs = group.costs;
    const auto filled_to = [&](int64_t level) {
      return fill_owners(costs, {0, num_owners - 1},
                         [&](int64_t owner) { return level - loads[static_cast<size_t>(owner)]; });
    };
    int64_t low = largest_of(costs) - 1;  // too low, or untried
    int64_t high = checked_add(*std::min_element(loads.begin(), loads.end()), sum_of(costs));
    while (high - low > 1) {
      const int64_t level = low + (high - low) / 2;
      (filled_to(level).empty() ? low : high) = level;
    }
    const std::vector<int64_t> filled = filled_to(high);
    add_costs(costs, filled, loads);
    for (auto next = filled.begin(); next != filled.end();) {
      const auto size = static_cast<std::ptrdiff_t>(columns[owners.size()].costs.size());
      owners.emplace_back(next, next + size);
      next += size;
    }
  }
  return owners;
}

// Matrices of one tensor that meet at unaligned elements, where no share can begin.
struct MatrixRun {
  size_t num_matrices = 0;
  int64_t cost = 0;
  int64_t owner = 0;
};

struct TensorRuns {
  size_t request = 0;
  size_t tensor = 0;
  std::vector<MatrixRun> runs;
};

std::vector<MatrixRun> runs_of(const FlatLayoutRequest& request, size_t tensor) {
  const int64_t align_numel = request.align_bytes / request.element_bytes;
  std::vector<MatrixRun> runs;
  bool begins = true;
  for (const OwnedMatrix& part :
       matrix_parts(request.shapes[tensor], request.matrix_rows[tensor])) {
    if (begins) runs.emplace_back();
    runs.back().cost = checked_add(runs.back().cost, newton_schulz_flops(part.rows, part.columns));
    ++runs.back().num_matrices;
    begins = part.range.end % align_numel == 0;
  }
  return runs;
}

void deal_to_inner_ranks(std::span<TensorRuns> tensors, int64_t inner_ranks) {
  std::vector<CostColumn> columns;
  for (const TensorRuns& tensor : tensors) {
    CostColumn& column = columns.emplace_back();
    column.group = static_cast<int64_t>(tensor.request);
    for (const MatrixRun& run : tensor.runs) column.costs.push_back(run.cost);
  }
  const ColumnOwners owners = balance_columns(columns, inner_ranks);
  for (size_t i = 0; i < tensors.size(); ++i)
    for (size_t k = 0; k < tensors[i].runs.size(); ++k) tensors[i].runs[k].owner = owners[i][k];
}

// Owners become shares.
void deal_to_outer_ranks(std::span<TensorRuns> tensors, int64_t outer_ranks) {
  std::stable_sort(tensors.begin(), tensors.end(), [](const TensorRuns& a, const TensorRuns& b) {
    return std::tuple(a.request, a.runs.front().owner, a.runs.back().owner) <
           std::tuple(b.request, b.runs.front().owner, b.runs.back().owner);
  });
  struct Held {
    std::vector<CostColumn> columns;  // one for each group
    std::vector<MatrixRun*> runs;     // of all columns
  };
  std::map<int64_t, Held> by_inner_rank;
  for (TensorRuns& tensor : tensors)
    for (MatrixRun& run : tensor.runs) {
      auto& [columns, runs] = by_inner_rank[run.owner];
      const auto group = static_cast<int64_t>(tensor.request);
      if (columns.empty() || columns.back().group != group)
        columns.push_back({.group = group, .costs = {}});
      columns.back().costs.push_back(run.cost);
      runs.push_back(&run);
    }
  for (const auto& [inner, held] : by_inner_rank) {
    auto run = held.runs.begin();
    for (const std::vector<int64_t>& of_group : balance_columns(held.columns, outer_ranks))
      for (const int64_t outer : of_group) (*run++)->owner = inner * outer_ranks + outer;
  }
}

}  // namespace

std::vector<OwnedMatrix> matrix_parts(std::span<const int64_t> shape,
                                      std::span<const int64_t> rows) {
  FSDP_ASSERT(shape.size() >= 2, "a tensor of ", shape.size(), " dims has no matrices");
  const int64_t columns = shape.back();
  int64_t all_rows = 1;
  for (const int64_t size : shape.first(shape.size() - 1)) all_rows = checked_mul(all_rows, size);
  const int64_t last_rows = shape[shape.size() - 2];
  std::vector<OwnedMatrix> parts;
  size_t next = 0;
  for (int64_t row = 0; row < all_rows;) {
    const int64_t of_this = rows.empty() ? last_rows : rows[next++ % rows.size()];
    FSDP_ASSERT(of_this > 0 && row + of_this <= all_rows, "a matrix of ", of_this, " rows at row ",
                row, " of ", all_rows);
    parts.push_back(
        {.range = {row * columns, (row + of_this) * columns}, .rows = of_this, .columns = columns});
    row += of_this;
  }
  return parts;
}

int64_t newton_schulz_flops(int64_t rows, int64_t columns) {
  const auto [m, n] = std::minmax(rows, columns);
  return checked_mul(checked_mul(2 * m, m), checked_add(2 * n, m));
}

int64_t newton_schulz_numel(int64_t rows, int64_t columns) {
  const int64_t m = std::min(rows, columns);
  return 2 * (rows * columns + m * m);
}

ColumnOwners balance_columns(std::span<const CostColumn> columns, int64_t num_owners) {
  if (columns.empty()) return {};
  const int64_t num_useful = useful_owners(columns, num_owners);
  ColumnOwners best = deal_in_order(columns, num_useful);
  std::vector<int64_t> loads(static_cast<size_t>(num_useful), 0);
  int64_t largest = 0;
  for (size_t i = 0; i < columns.size(); ++i) {
    add_costs(columns[i].costs, best[i], loads);
    largest = std::max(largest, largest_of(columns[i].costs));
  }
  int64_t busiest = largest_of(loads);
  const int64_t lowest = std::max(largest, ceil_div(sum_of(loads), num_useful));
  const std::vector<size_t> order = largest_first(columns);
  // More of a group on one owner must save the busiest a twentieth.
  for (const int64_t factor : {1, 2, 4}) {
    int64_t high = factor == 1 ? busiest : busiest - busiest / 20;
    int64_t low = lowest - 1;
    // The lowest level at which all find room, to a thousandth: first the lowest that can be.
    for (int64_t level = lowest; high - low > 1 + low / 1000; level = low + (high - low) / 2) {
      LevelDeal deal(columns, num_useful, level, factor);
      if (std::all_of(order.begin(), order.end(), [&](size_t i) { return deal.add(i); })) {
        high = busiest = deal.busiest();
        best = std::move(deal.owners());
      } else {
        low = level;
      }
    }
  }
  return best;
}

void deal_matrices(std::span<FlatLayoutRequest* const> requests) {
  std::vector<TensorRuns> tensors;
  for (size_t r = 0; r < requests.size(); ++r) {
    FlatLayoutRequest& request = *requests[r];
    FSDP_ASSERT(request.inner_ranks == requests[0]->inner_ranks &&
                    request.outer_ranks == requests[0]->outer_ranks,
                "request ", r, " is for other ranks");
    request.matrix_owners.assign(request.matrix_rows.size(), {});
    for (size_t i = 0; i < request.matrix_rows.size(); ++i)
      if (std::vector<MatrixRun> runs = runs_of(request, i); !runs.empty())
        tensors.push_back({.request = r, .tensor = i, .runs = std::move(runs)});
  }
  if (tensors.empty()) return;
  deal_to_inner_ranks(tensors, requests[0]->inner_ranks);
  deal_to_outer_ranks(tensors, requests[0]->outer_ranks);
  for (const TensorRuns& tensor : tensors) {
    std::vector<int64_t>& owners = requests[tensor.request]->matrix_owners[tensor.tensor];
    for (const MatrixRun& run : tensor.runs)
      owners.insert(owners.end(), run.num_matrices, run.owner);
  }
}

Packing pack_matrices(std::span<const BrickedTensor> tensors, const FlatLayoutRequest& request) {
  const int64_t align_numel = request.align_bytes / request.element_bytes;
  Packing packing{.offsets = std::vector<int64_t>(request.shapes.size(), 0), .segments = {}};
  const auto parts_of = [&](const BrickedTensor& tensor) {
    const auto i = static_cast<size_t>(tensor.tensor);
    return matrix_parts(request.shapes[i], request.matrix_rows[i]);
  };
  const auto owners_of = [&](const BrickedTensor& tensor) -> const std::vector<int64_t>& {
    return request.matrix_owners[static_cast<size_t>(tensor.tensor)];
  };
  BrickedTensors in_order(tensors.begin(), tensors.end());
  std::stable_sort(in_order.begin(), in_order.end(),
                   [&](const BrickedTensor& a, const BrickedTensor& b) {
                     return std::pair(owners_of(a).front(), owners_of(a).back()) <
                            std::pair(owners_of(b).front(), owners_of(b).back());
                   });
  std::vector<Segment::UnevenShare> shares;
  int64_t at = 0;
  for (const BrickedTensor& tensor : in_order) {
    packing.offsets[static_cast<size_t>(tensor.tensor)] = at;
    const std::vector<OwnedMatrix> parts = parts_of(tensor);
    FSDP_ASSERT(owners_of(tensor).size() == parts.size(), "tensor ", tensor.tensor);
    for (size_t i = 0; i < parts.size(); ++i) {
      const int64_t owner = owners_of(tensor)[i];
      const int64_t begin = parts[i].range.begin;
      if (shares.empty() || shares.back().index != owner) {
        FSDP_ASSERT(shares.empty() || shares.back().index < owner, "owner ", owner, " of tensor ",
                    tensor.tensor, " comes after a later one");
        FSDP_ASSERT(begin % align_numel == 0, "a share would begin at element ", begin);
        shares.push_back({.index = owner, .numel = 0});
      }
      const int64_t end = i + 1 < parts.size() ? parts[i].range.end : tensor.numel;
      shares.back().numel = checked_add(shares.back().numel, end - begin);
    }
    at = checked_add(at, tensor.numel);
  }
  packing.segments.push_back(Segment::uneven(0, shares));
  return packing;
}

}  // namespace fsdp
