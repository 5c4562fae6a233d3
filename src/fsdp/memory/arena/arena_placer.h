// Places live intervals into one arena, one after the other in a given order.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace fsdp {

// A rectangle: `bytes` high, from time `first` to time `last`, both included.
struct ArenaItem {
  int64_t bytes = 0;
  int32_t first = 0;
  int32_t last = 0;
};

// Where an item goes when several gaps between its placed neighbours could take it.
enum class Fit {
  kLowest,    // the lowest gap that is large enough
  kTightest,  // the gap it leaves the least of; gaps without a ceiling come last
};

// Owns the neighbour lists (who is live together with whom), which many placements share. Two items
// that are live together never overlap, whatever the order.
class ArenaPlacer {
 public:
  explicit ArenaPlacer(std::vector<ArenaItem> items);

  // Fills offsets() by placing every item of `order` (a permutation); returns the arena's height.
  // Gives up early, returning a height above `give_up_above`, once an item ends above it.
  int64_t place(std::span<const int32_t> order, Fit fit, int64_t give_up_above);

  std::span<const ArenaItem> items() const { return items_; }
  std::span<const int64_t> offsets() const { return offsets_; }
  std::span<const int32_t> neighbours(int32_t item) const;

 private:
  int64_t offset_for(int32_t item, Fit fit);

  std::vector<ArenaItem> items_;
  std::vector<int32_t> neighbours_;       // of all items, one after the other
  std::vector<int32_t> first_neighbour_;  // where an item's neighbours begin; one past the end too
  std::vector<int64_t> offsets_;          // -1: not placed yet
  struct Taken {
    int64_t begin;
    int64_t end;
  };
  std::vector<Taken> taken_;  // scratch of offset_for
};

}  // namespace fsdp
