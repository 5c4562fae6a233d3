#include "fsdp/layout/matrix_balance.h"

#include <algorithm>
#include <compare>
#include <cstddef>
#include <numeric>
#include <optional>
#include <utility>

#include "fsdp/base/integer.h"

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

// The same from the last of those owners back, so that columns of the group find more owners free.
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

}  // namespace

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

}  // namespace fsdp
