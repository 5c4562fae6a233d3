#include "fsdp/memory/arena/arena_placer.h"

#include <algorithm>
#include <limits>

#include "fsdp/base/integer.h"

namespace fsdp {

ArenaPlacer::ArenaPlacer(std::vector<ArenaItem> items)
    : items_(std::move(items)), offsets_(items_.size(), -1) {
  first_neighbour_.reserve(items_.size() + 1);
  for (size_t i = 0; i < items_.size(); ++i) {
    first_neighbour_.push_back(static_cast<int32_t>(neighbours_.size()));
    for (size_t j = 0; j < items_.size(); ++j) {
      const bool live_together =
          items_[i].first <= items_[j].last && items_[j].first <= items_[i].last;
      // Items without bytes are nobody's neighbours: they may share an address with anybody.
      if (i != j && live_together && items_[i].bytes > 0 && items_[j].bytes > 0) {
        neighbours_.push_back(static_cast<int32_t>(j));
      }
    }
  }
  first_neighbour_.push_back(static_cast<int32_t>(neighbours_.size()));
}

std::span<const int32_t> ArenaPlacer::neighbours(int32_t item) const {
  const auto begin = static_cast<size_t>(first_neighbour_[static_cast<size_t>(item)]);
  const auto end = static_cast<size_t>(first_neighbour_[static_cast<size_t>(item) + 1]);
  return std::span<const int32_t>(neighbours_).subspan(begin, end - begin);
}

int64_t ArenaPlacer::place(std::span<const int32_t> order, Fit fit, int64_t give_up_above) {
  std::fill(offsets_.begin(), offsets_.end(), -1);
  int64_t height = 0;
  for (const int32_t item : order) {
    const int64_t offset = offset_for(item, fit);
    offsets_[static_cast<size_t>(item)] = offset;
    height = std::max(height, offset + items_[static_cast<size_t>(item)].bytes);
    if (height > give_up_above) return height;
  }
  return height;
}

int64_t ArenaPlacer::offset_for(int32_t item, Fit fit) {
  taken_.clear();
  for (const int32_t neighbour : neighbours(item)) {
    const int64_t offset = offsets_[static_cast<size_t>(neighbour)];
    if (offset < 0) continue;
    taken_.push_back({offset, offset + items_[static_cast<size_t>(neighbour)].bytes});
  }
  std::sort(taken_.begin(), taken_.end(),
            [](const Taken& a, const Taken& b) { return a.begin < b.begin; });

  const int64_t bytes = items_[static_cast<size_t>(item)].bytes;
  int64_t best = -1;
  int64_t best_gap = std::numeric_limits<int64_t>::max();
  int64_t top = 0;  // of everything taken so far
  for (const Taken& taken : taken_) {
    const int64_t gap = taken.begin - top;
    if (gap >= bytes && gap < best_gap) {
      if (fit == Fit::kLowest) return top;
      best = top;
      best_gap = gap;
    }
    top = std::max(top, taken.end);
  }
  return best >= 0 ? best : top;
}

}  // namespace fsdp
