#include "fsdp/layout/packing.h"

#include <algorithm>
#include <compare>
#include <functional>
#include <map>
#include <numeric>
#include <optional>
#include <queue>
#include <tuple>
#include <utility>
#include <vector>

#include "fsdp/base/error.h"
#include "fsdp/base/integer.h"

namespace fsdp {

namespace {

// Every a gives a true bound; these numbers of tries find the best one for all models we know.
constexpr size_t kMaxSizes = 48;
constexpr int64_t kMaxDivisor = 24;

struct Piece {
  int64_t numel = 0;
  int64_t count = 0;
};

std::vector<Piece> pieces_by_volume(std::span<const BrickedTensor> tensors) {
  std::map<int64_t, int64_t> count_by_size;
  for (const BrickedTensor& tensor : tensors) {
    count_by_size[tensor.brick_numel] += tensor.numel / tensor.brick_numel;
    const int64_t rest = tensor.numel % tensor.brick_numel;
    if (rest > 0) ++count_by_size[rest];
  }
  std::vector<Piece> pieces;
  for (const auto& [numel, count] : count_by_size) pieces.push_back({numel, count});
  std::stable_sort(pieces.begin(), pieces.end(), [](const Piece& a, const Piece& b) {
    return a.numel * a.count > b.numel * b.count;
  });
  return pieces;
}

// The bound of the header for a = size / divisor.
int64_t bound_for(std::span<const Piece> pieces, int64_t size, int64_t divisor, int64_t num_ranks) {
  using Wide = unsigned __int128;  // a size times a divisor or a count may need more than 64 bits
  const auto wide_divisor = static_cast<Wide>(divisor);
  const auto wide_size = static_cast<Wide>(size);
  Wide sum = 0;
  for (const Piece& piece : pieces) {
    sum +=
        static_cast<Wide>(piece.numel) * wide_divisor / wide_size * static_cast<Wide>(piece.count);
  }
  const auto ranks = static_cast<Wide>(num_ranks);
  const Wide per_rank = (sum + ranks - 1) / ranks;
  return static_cast<int64_t>((per_rank * wide_size + wide_divisor - 1) / wide_divisor);
}

// --- rows ---------------------------------------------------------------------------------------

constexpr int64_t kNowhere = -1;

// A segment while it is being filled. Positions count from its own begin.
class SegmentPacker {
 public:
  struct Placed {
    BrickedTensor tensor;
    int64_t position = 0;
  };

  SegmentPacker(int64_t share_numel, int64_t num_shares);

  // Puts the tensor into the first gap that takes it; false when there is none.
  bool place(const BrickedTensor& tensor);

  int64_t share_numel() const { return share_numel_; }
  std::span<const Placed> placed() const { return placed_; }

 private:
  bool cuts_between_bricks(const BrickedTensor& tensor, int64_t position) const;
  int64_t position_in(const FlatRange& gap, const BrickedTensor& tensor) const;

  int64_t share_numel_;
  std::vector<FlatRange> gaps_;
  std::vector<Placed> placed_;
  BrickedTensor last_;    // the tensor placed last
  size_t first_gap_ = 0;  // gaps before this one refused it
};

SegmentPacker::SegmentPacker(int64_t share_numel, int64_t num_shares) : share_numel_(share_numel) {
  if (share_numel > 0) gaps_.push_back({0, checked_mul(share_numel, num_shares)});
}

// Cuts lie at multiples of the share. The first one inside the tensor must meet a brick's end; when
// there are more, the share must be a whole number of bricks as well.
bool SegmentPacker::cuts_between_bricks(const BrickedTensor& tensor, int64_t position) const {
  const int64_t end = position + tensor.numel;
  const int64_t first_cut = (position / share_numel_ + 1) * share_numel_;
  if (first_cut >= end) return true;
  if ((first_cut - position) % tensor.brick_numel != 0) return false;
  return end - first_cut <= share_numel_ || share_numel_ % tensor.brick_numel == 0;
}

int64_t SegmentPacker::position_in(const FlatRange& gap, const BrickedTensor& tensor) const {
  if (gap.numel() < tensor.numel) return kNowhere;
  const int64_t next_cut = (gap.begin / share_numel_ + 1) * share_numel_;
  const int64_t bricks_before_cut = (next_cut - gap.begin) / tensor.brick_numel;
  // At once; with whole bricks before the next cut; after the next cut.
  for (const int64_t position :
       {gap.begin, next_cut - bricks_before_cut * tensor.brick_numel, next_cut}) {
    if (position + tensor.numel > gap.end) return kNowhere;
    if (cuts_between_bricks(tensor, position)) return position;
  }
  return kNowhere;
}

bool SegmentPacker::place(const BrickedTensor& tensor) {
  // Models repeat shapes by the hundred. A gap that refused one tensor refuses all of the same
  // shape, so the search goes on behind that gap.
  const bool is_twin = tensor.numel == last_.numel && tensor.brick_numel == last_.brick_numel;
  last_ = tensor;
  if (!is_twin) first_gap_ = 0;
  for (; first_gap_ < gaps_.size(); ++first_gap_) {
    const FlatRange gap = gaps_[first_gap_];
    const int64_t position = position_in(gap, tensor);
    if (position == kNowhere) continue;
    placed_.push_back({tensor, position});
    const auto at = gaps_.begin() + static_cast<std::ptrdiff_t>(first_gap_);
    const FlatRange before{gap.begin, position};
    *at = {position + tensor.numel, gap.end};
    if (at->empty()) gaps_.erase(at);
    if (!before.empty()) {
      gaps_.insert(gaps_.begin() + static_cast<std::ptrdiff_t>(first_gap_), before);
      ++first_gap_;
    }
    return true;
  }
  return false;
}

std::optional<SegmentPacker> try_pack(std::span<const BrickedTensor> tensors, int64_t share_numel,
                                      int64_t num_shares) {
  SegmentPacker packer(share_numel, num_shares);
  for (const BrickedTensor& tensor : tensors) {
    if (!packer.place(tensor)) return std::nullopt;
  }
  return packer;
}

// The segment with the shortest share found that takes all of the tensors, placed in the order
// given; nullopt when its share would have to be longer than max_share_numel. The share is a
// multiple of unit_numel, or as short as the volume allows where that works too.
std::optional<SegmentPacker> pack_segment(std::span<const BrickedTensor> tensors,
                                          int64_t unit_numel, int64_t align_numel,
                                          int64_t num_shares, int64_t max_share_numel) {
  int64_t volume = 0;
  for (const BrickedTensor& tensor : tensors) volume = checked_add(volume, tensor.numel);
  const int64_t shortest = round_up(ceil_div(volume, num_shares), align_numel);
  if (shortest > max_share_numel) return std::nullopt;
  if (auto packer = try_pack(tensors, shortest, num_shares)) return packer;

  // Usually a finite limit is too small, so it is tried first.
  if (max_share_numel != INT64_MAX &&
      !try_pack(tensors, max_share_numel / unit_numel * unit_numel, num_shares)) {
    return std::nullopt;
  }
  // Lengths in units from here on. Double the step until it fits (one share that holds the whole
  // volume always does), then halve.
  const int64_t longest = max_share_numel / unit_numel;
  int64_t too_short = ceil_div(shortest, unit_numel) - 1;
  int64_t long_enough = too_short;
  std::optional<SegmentPacker> best;
  for (int64_t step = 1; !best; step *= 2) {
    if (too_short >= longest) return std::nullopt;
    long_enough = std::min(too_short + step, longest);
    best = try_pack(tensors, checked_mul(long_enough, unit_numel), num_shares);
    if (!best) too_short = long_enough;
  }
  while (long_enough - too_short > 1) {
    const int64_t middle = too_short + (long_enough - too_short) / 2;
    if (auto packer = try_pack(tensors, middle * unit_numel, num_shares)) {
      best = std::move(packer);
      long_enough = middle;
    } else {
      too_short = middle;
    }
  }
  return best;
}

// A gather is one coalesced launch over all segments, but each adds a little to it.
constexpr size_t kMaxRowSegments = 8;

// A segment fewer is worth this part of the shard in padding: 1 / 2048, 0.05 %.
constexpr int64_t kSegmentWorth = 2048;

struct OpenSegment {
  SegmentPacker packer;
  int64_t unit_numel = 0;
};

BrickedTensors tensors_of(const SegmentPacker& packer) {
  BrickedTensors tensors;
  for (const SegmentPacker::Placed& placed : packer.placed()) tensors.push_back(placed.tensor);
  return tensors;
}

class RowPacker {
 public:
  RowPacker(int64_t align_numel, int64_t num_shares)
      : align_numel_(align_numel), num_shares_(num_shares) {}

  // Tensors that fit wherever there is room; the rest become a class.
  void add_fillers(const BrickedTensors& tensors) {
    BrickedTensors rest;
    for (const BrickedTensor& tensor : tensors) {
      if (!place_anywhere(tensor)) rest.push_back(tensor);
    }
    add_class(rest, align_numel_);
  }

  void add_class(const BrickedTensors& tensors, int64_t unit_numel) {
    if (tensors.empty()) return;
    OpenSegment own{*pack_segment(tensors, unit_numel, align_numel_, num_shares_, INT64_MAX),
                    unit_numel};
    std::optional<Joined> joined = best_join(tensors, own.packer.share_numel());
    if (joined) {
      segments_[joined->segment].packer = std::move(joined->packer);
    } else {
      segments_.push_back(std::move(own));
    }
  }

  Packing packing(int64_t num_tensors) const {
    Packing packing{.offsets = std::vector<int64_t>(static_cast<size_t>(num_tensors), 0),
                    .segments = {}};
    int64_t begin = 0;
    for (const OpenSegment& segment : segments_) {
      for (const SegmentPacker::Placed& placed : segment.packer.placed()) {
        packing.offsets[static_cast<size_t>(placed.tensor.tensor)] = begin + placed.position;
      }
      packing.segments.push_back(Segment::even(begin, segment.packer.share_numel(), num_shares_));
      begin = packing.segments.back().range().end;
    }
    return packing;
  }

 private:
  struct Joined {
    size_t segment = 0;
    SegmentPacker packer;
  };

  bool place_anywhere(const BrickedTensor& tensor) {
    return std::any_of(segments_.begin(), segments_.end(),
                       [&](OpenSegment& segment) { return segment.packer.place(tensor); });
  }

  // The segment whose share grows least when it takes the whole class, if that is worth it.
  std::optional<Joined> best_join(const BrickedTensors& tensors, int64_t own_share_numel) const {
    int64_t total_numel = own_share_numel;
    for (const OpenSegment& segment : segments_) {
      total_numel = checked_add(total_numel, segment.packer.share_numel());
    }
    int64_t max_growth = checked_add(own_share_numel, total_numel / kSegmentWorth);
    if (segments_.size() == kMaxRowSegments) max_growth = INT64_MAX;

    std::optional<Joined> best;
    for (size_t i = 0; i < segments_.size(); ++i) {
      const OpenSegment& segment = segments_[i];
      const int64_t share_numel = segment.packer.share_numel();
      BrickedTensors all = tensors_of(segment.packer);
      all.insert(all.end(), tensors.begin(), tensors.end());
      const int64_t limit =
          max_growth > INT64_MAX - share_numel ? INT64_MAX : share_numel + max_growth;
      auto packer = pack_segment(all, segment.unit_numel, align_numel_, num_shares_, limit);
      if (!packer) continue;
      const int64_t growth = packer->share_numel() - share_numel;
      best = Joined{.segment = i, .packer = *std::move(packer)};
      if (growth <= 0) break;
      max_growth = growth - 1;
    }
    return best;
  }

  int64_t align_numel_;
  int64_t num_shares_;
  std::vector<OpenSegment> segments_;
};

struct Owner {
  int64_t load = 0;
  int64_t index = 0;  // decides between equal loads

  friend auto operator<=>(const Owner&, const Owner&) = default;
};

// The owners that can get a tensor, those with the least load. Without loads they are the first
// ones, so that nothing here is proportional to the number of ranks.
std::vector<Owner> candidates(int64_t num_possible, size_t num_tensors,
                              std::span<const int64_t> loads) {
  const auto num_owners = std::min(num_possible, static_cast<int64_t>(num_tensors));
  std::vector<Owner> owners(static_cast<size_t>(loads.empty() ? num_owners : num_possible));
  for (size_t i = 0; i < owners.size(); ++i)
    owners[i] = {loads.empty() ? 0 : loads[i], static_cast<int64_t>(i)};
  std::partial_sort(owners.begin(), owners.begin() + num_owners, owners.end());
  owners.resize(static_cast<size_t>(num_owners));
  return owners;
}

// The longest-processing-time rule: owner -> its tensors. `tensors` must be sorted, largest first.
std::map<int64_t, BrickedTensors> spread(const BrickedTensors& tensors, int64_t num_possible_owners,
                                         std::span<const int64_t> loads) {
  const std::vector<Owner> owners = candidates(num_possible_owners, tensors.size(), loads);
  std::priority_queue<Owner, std::vector<Owner>, std::greater<>> least_loaded(owners.begin(),
                                                                              owners.end());
  std::map<int64_t, BrickedTensors> owned;
  for (const BrickedTensor& tensor : tensors) {
    const Owner owner = least_loaded.top();
    least_loaded.pop();
    owned[owner.index].push_back(tensor);
    least_loaded.push({checked_add(owner.load, tensor.numel), owner.index});
  }
  return owned;
}

// The load of each inner rank: what its outer ranks hold together.
std::vector<int64_t> inner_loads(std::span<const int64_t> held_load, MeshShape mesh) {
  if (held_load.empty()) return {};
  std::vector<int64_t> loads(static_cast<size_t>(mesh.inner), 0);
  for (size_t share = 0; share < held_load.size(); ++share) {
    int64_t& load = loads[share / static_cast<size_t>(mesh.outer)];
    load = checked_add(load, held_load[share]);
  }
  return loads;
}

}  // namespace

BrickedTensor bricked(int64_t tensor, int64_t numel, int64_t indivisible_numel,
                      int64_t align_numel) {
  const int64_t padded = round_up(numel, align_numel);
  int64_t brick = 0;
  const bool overflows = __builtin_mul_overflow(
      indivisible_numel / std::gcd(indivisible_numel, align_numel), align_numel, &brick);
  return {.tensor = tensor,
          .numel = padded,
          .brick_numel = overflows ? padded : std::min(brick, padded)};
}

int64_t min_shard_numel(std::span<const BrickedTensor> tensors, int64_t align_numel,
                        int64_t num_ranks) {
  const std::vector<Piece> pieces = pieces_by_volume(tensors);
  if (pieces.empty()) return 0;
  // a = align_numel is the plain volume; a = the largest piece says that it must fit.
  int64_t bound = bound_for(pieces, align_numel, 1, num_ranks);
  for (const Piece& piece : pieces) bound = std::max(bound, piece.numel);
  for (size_t i = 0; i < std::min(pieces.size(), kMaxSizes); ++i) {
    for (int64_t divisor = 1; divisor <= kMaxDivisor; ++divisor) {
      bound = std::max(bound, bound_for(pieces, pieces[i].numel, divisor, num_ranks));
    }
  }
  return round_up(bound, align_numel);
}

Packing pack_rows(std::span<const BrickedTensor> tensors, int64_t num_tensors, int64_t align_numel,
                  int64_t num_shares) {
  BrickedTensors sorted(tensors.begin(), tensors.end());
  std::stable_sort(sorted.begin(), sorted.end(),
                   [](const BrickedTensor& a, const BrickedTensor& b) {
                     return std::tie(a.brick_numel, a.numel) > std::tie(b.brick_numel, b.numel);
                   });
  std::map<int64_t, BrickedTensors, std::greater<>> classes;
  BrickedTensors single_bricks;
  BrickedTensors divisible;
  for (const BrickedTensor& tensor : sorted) {
    if (tensor.brick_numel == align_numel) {
      divisible.push_back(tensor);
    } else if (tensor.is_single_brick()) {
      single_bricks.push_back(tensor);
    } else {
      classes[tensor.brick_numel].push_back(tensor);
    }
  }
  RowPacker packer(align_numel, num_shares);
  for (const auto& [brick_numel, members] : classes) packer.add_class(members, brick_numel);
  packer.add_fillers(single_bricks);
  packer.add_fillers(divisible);
  return packer.packing(num_tensors);
}

Packing balance_tensors(std::span<const BrickedTensor> tensors, int64_t num_tensors, MeshShape mesh,
                        std::span<const int64_t> held_load) {
  BrickedTensors sorted(tensors.begin(), tensors.end());
  std::stable_sort(
      sorted.begin(), sorted.end(),
      [](const BrickedTensor& a, const BrickedTensor& b) { return a.numel > b.numel; });
  Packing packing{.offsets = std::vector<int64_t>(static_cast<size_t>(num_tensors), 0),
                  .segments = {}};
  std::vector<Segment::UnevenShare> shares;
  int64_t at = 0;
  const auto outer = static_cast<size_t>(mesh.outer);
  for (const auto& [inner, of_inner] : spread(sorted, mesh.inner, inner_loads(held_load, mesh))) {
    const auto held = held_load.empty()
                          ? held_load
                          : held_load.subspan(static_cast<size_t>(inner) * outer, outer);
    for (auto& [outer_rank, share] : spread(of_inner, mesh.outer, held)) {
      BrickedTensors in_order = share;
      std::sort(in_order.begin(), in_order.end(),
                [](const BrickedTensor& a, const BrickedTensor& b) { return a.tensor < b.tensor; });
      const int64_t begin = at;
      for (const BrickedTensor& tensor : in_order) {
        packing.offsets[static_cast<size_t>(tensor.tensor)] = at;
        at = checked_add(at, tensor.numel);
      }
      shares.push_back({.index = inner * mesh.outer + outer_rank, .numel = at - begin});
    }
  }
  packing.segments.push_back(Segment::uneven(0, shares));
  return packing;
}

}  // namespace fsdp
