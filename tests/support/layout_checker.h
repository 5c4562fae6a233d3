// Checks everything a FlatLayout promises, element by element, for the random test and the fuzzer.
// Written from the promises in flat_layout.h, without the arithmetic of the implementation.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "fsdp/base/text.h"
#include "fsdp/layout/box.h"
#include "fsdp/layout/flat_layout.h"

namespace fsdp::testing {

// Each check returns the fault, or "".
#define FSDP_PROMISE(condition, ...) \
  if (!(condition)) return ::fsdp::concat(#condition, ": ", __VA_ARGS__)

// A size of 0 wins over sizes that would overflow together, as in the layout itself.
inline int64_t product(std::span<const int64_t> sizes) {
  if (std::find(sizes.begin(), sizes.end(), 0) != sizes.end()) return 0;
  int64_t numel = 1;
  for (const int64_t size : sizes) numel *= size;
  return numel;
}

// Walks every element of every box: they must be exactly the range, in flat order.
inline std::string check_boxes(std::span<const int64_t> shape, FlatRange range) {
  const std::vector<Box> found = boxes(shape, range);
  const size_t num_dims = shape.size();
  FSDP_PROMISE(found.size() <= (num_dims == 0 ? 1 : 2 * num_dims - 1), list_text(shape));
  int64_t expected = range.begin;
  for (const Box& box : found) {
    FSDP_PROMISE(box.offsets.size() == num_dims && box.sizes.size() == num_dims, list_text(shape));
    for (size_t d = 0; d < num_dims; ++d) {
      FSDP_PROMISE(box.offsets[d] >= 0 && box.sizes[d] > 0, list_text(box.sizes));
      FSDP_PROMISE(box.offsets[d] + box.sizes[d] <= shape[d], list_text(box.offsets));
    }
    FSDP_PROMISE(box.numel() == product(box.sizes), list_text(box.sizes));
    std::vector<int64_t> index(num_dims, 0);
    for (int64_t i = 0; i < box.numel(); ++i) {
      int64_t flat = 0;
      for (size_t d = 0; d < num_dims; ++d) flat = flat * shape[d] + box.offsets[d] + index[d];
      FSDP_PROMISE(flat == expected, "element ", flat, " of shape ", list_text(shape));
      ++expected;
      for (size_t d = num_dims; d-- > 0;) {
        if (++index[d] < box.sizes[d]) break;
        index[d] = 0;
      }
    }
  }
  FSDP_PROMISE(expected == range.end, list_text(shape), " [", range.begin, ", ", range.end, ")");
  return "";
}

class LayoutChecker {
 public:
  explicit LayoutChecker(const FlatLayout& layout) : layout_(layout), request_(layout.request()) {}

  std::string check() {
    for (const auto part : {&LayoutChecker::check_tensors, &LayoutChecker::check_segments,
                            &LayoutChecker::check_owners, &LayoutChecker::check_cuts,
                            &LayoutChecker::check_sizes, &LayoutChecker::check_repeats}) {
      if (std::string problem = (this->*part)(); !problem.empty()) return problem;
    }
    for (const PlacementPair placed : kAllPlacementPairs) {
      if (std::string problem = check_placement(placed); !problem.empty()) {
        return concat(to_text(placed), ": ", problem);
      }
    }
    return "";
  }

 private:
  static constexpr PlacementPair kBothSharded = {Placement::kShard, Placement::kShard};

  size_t padded() const { return static_cast<size_t>(layout_.padded_numel()); }
  bool is_aligned(int64_t position) const {
    return position * request_.element_bytes % request_.align_bytes == 0;
  }

  // Complete, aligned, disjoint, in bounds.
  std::string check_tensors() {
    tensor_at_.assign(padded(), -1);
    FSDP_PROMISE(layout_.num_tensors() == static_cast<int64_t>(request_.shapes.size()), "");
    int64_t sum = 0;
    for (int64_t t = 0; t < layout_.num_tensors(); ++t) {
      const FlatRange range = layout_.tensor_range(t);
      FSDP_PROMISE(range.numel() == product(request_.shapes[static_cast<size_t>(t)]), "tensor ", t);
      FSDP_PROMISE(is_aligned(range.begin), "tensor ", t, " at ", range.begin);
      FSDP_PROMISE(range.begin >= 0 && range.end <= layout_.padded_numel(), "tensor ", t);
      for (int64_t e = range.begin; e < range.end; ++e) {
        int64_t& owner = tensor_at_[static_cast<size_t>(e)];
        FSDP_PROMISE(owner == -1, "element ", e, " belongs to tensors ", owner, " and ", t);
        owner = t;
      }
      sum += range.numel();
    }
    FSDP_PROMISE(sum == layout_.tensor_numel(), sum);
    return "";
  }

  std::string check_segments() {
    int64_t position = 0;
    for (const Segment& segment : layout_.segments()) {
      FSDP_PROMISE(segment.range().begin == position, "segment at ", position);
      position = segment.range().end;
    }
    FSDP_PROMISE(position == layout_.padded_numel(), position);
    return "";
  }

  // With both axes sharded every element has exactly one owner, and its shard starts aligned.
  std::string check_owners() {
    owner_at_.assign(padded(), {-1, -1});
    for (int64_t inner = 0; inner < request_.inner_ranks; ++inner) {
      for (int64_t outer = 0; outer < request_.outer_ranks; ++outer) {
        const MeshCoordinate rank{.outer = outer, .inner = inner};
        for (const ShardRange& range : layout_.shard_ranges(kBothSharded, rank)) {
          FSDP_PROMISE(is_aligned(range.flat.begin), "shard at ", range.flat.begin);
          for (int64_t e = range.flat.begin; e < range.flat.end; ++e) {
            MeshCoordinate& owner = owner_at_.at(static_cast<size_t>(e));
            FSDP_PROMISE(owner.inner == -1, "element ", e, " has two owners");
            owner = rank;
          }
        }
      }
    }
    for (size_t e = 0; e < padded(); ++e) FSDP_PROMISE(owner_at_[e].inner >= 0, "element ", e);
    return "";
  }

  std::string check_cuts() {
    for (size_t e = 1; e < padded(); ++e) {
      const int64_t tensor = tensor_at_[e];
      if (owner_at_[e - 1] == owner_at_[e] || tensor == -1 || tensor_at_[e - 1] != tensor) continue;
      const int64_t cut = static_cast<int64_t>(e) - layout_.tensor_range(tensor).begin;
      const std::span<const int64_t> shape = request_.shapes[static_cast<size_t>(tensor)];
      switch (request_.granularity.kind) {
        case Granularity::Kind::kElement:
          break;
        case Granularity::Kind::kRow:
          FSDP_PROMISE(cut % product(shape.subspan(1)) == 0, list_text(shape), " cut at ", cut);
          break;
        case Granularity::Kind::kBlock:
          FSDP_PROMISE(cut % request_.granularity.block_numel == 0, list_text(shape), " cut at ",
                       cut);
          break;
        case Granularity::Kind::kTensor:
          FSDP_PROMISE(!request_.matrix_rows.empty() && begins_matrix(tensor, cut), "tensor ",
                       list_text(shape), " is cut at ", cut);
          break;
      }
    }
    return "";
  }

  bool begins_matrix(int64_t tensor, int64_t element) const {
    const std::vector<OwnedMatrix> parts = layout_.matrices_of(tensor);
    return std::any_of(parts.begin(), parts.end(),
                       [&](const OwnedMatrix& part) { return part.range.begin == element; });
  }

  std::string check_sizes() {
    const int64_t bound = layout_.lower_bound_numel();
    FSDP_PROMISE(bound >= layout_.tensor_numel(), bound);
    FSDP_PROMISE(bound <= layout_.padded_numel(), bound, " of ", layout_.padded_numel());
    const bool may_be_uneven = request_.granularity.kind == Granularity::Kind::kTensor;
    FSDP_PROMISE(layout_.has_even_shards() != may_be_uneven, "");
    if (request_.granularity.kind == Granularity::Kind::kElement) {
      FSDP_PROMISE(bound == layout_.padded_numel(), bound, " of ", layout_.padded_numel());
    }
    return "";
  }

  std::string check_repeats() {
    const FlatLayout again(request_);
    for (int64_t t = 0; t < layout_.num_tensors(); ++t) {
      FSDP_PROMISE(again.tensor_range(t) == layout_.tensor_range(t), "tensor ", t);
    }
    FSDP_PROMISE(std::ranges::equal(again.segments(), layout_.segments()), "");
    return "";
  }

  std::string check_placement(PlacementPair placed) {
    const PlacementPair whole{without_partial(placed.outer), without_partial(placed.inner)};
    if (placed != whole) return check_same_shards(placed, whole);
    std::vector<int64_t> holders(padded(), 0);
    int64_t max_numel = 0;
    for (int64_t inner = 0; inner < request_.inner_ranks; ++inner) {
      for (int64_t outer = 0; outer < request_.outer_ranks; ++outer) {
        const MeshCoordinate rank{.outer = outer, .inner = inner};
        std::string problem = check_shard(placed, rank, holders);
        if (problem.empty()) problem = check_slices(placed, rank);
        if (!problem.empty()) return concat("rank (", outer, ", ", inner, "): ", problem);
        max_numel = std::max(max_numel, layout_.shard_numel(placed, rank));
      }
    }
    FSDP_PROMISE(max_numel == layout_.max_shard_numel(placed), max_numel);
    // There is a copy for each rank along the axes that do not shard it.
    const int64_t copies =
        request_.inner_ranks * request_.outer_ranks / num_shards(placed, layout_.mesh());
    for (size_t e = 0; e < padded(); ++e) FSDP_PROMISE(holders[e] == copies, "element ", e);
    return "";
  }

  static Placement without_partial(Placement placement) {
    return placement == Placement::kPartial ? Placement::kReplicate : placement;
  }

  // Partial is about values; the ranges are those of Replicate.
  std::string check_same_shards(PlacementPair a, PlacementPair b) const {
    for (int64_t inner = 0; inner < request_.inner_ranks; ++inner) {
      for (int64_t outer = 0; outer < request_.outer_ranks; ++outer) {
        const MeshCoordinate rank{.outer = outer, .inner = inner};
        FSDP_PROMISE(layout_.shard_ranges(a, rank) == layout_.shard_ranges(b, rank), inner);
        FSDP_PROMISE(layout_.tensor_slices(a, rank) == layout_.tensor_slices(b, rank), inner);
      }
    }
    FSDP_PROMISE(layout_.max_shard_numel(a) == layout_.max_shard_numel(b), "");
    return "";
  }

  // A rank holds, in flat order, the elements whose owner agrees with it on the sharded axes.
  std::string check_shard(PlacementPair placed, MeshCoordinate rank,
                          std::vector<int64_t>& holders) {
    local_at_.assign(padded(), -1);
    num_held_ = 0;
    int64_t local = 0;
    int64_t end_before = 0;
    for (const ShardRange& range : layout_.shard_ranges(placed, rank)) {
      FSDP_PROMISE(range.local_begin == local && !range.flat.empty(), "local ", local);
      FSDP_PROMISE(range.flat.begin >= end_before, "flat ", range.flat.begin);
      const FlatRange segment = layout_.segments()[static_cast<size_t>(range.segment)].range();
      FSDP_PROMISE(segment.begin <= range.flat.begin && range.flat.end <= segment.end, "");
      for (int64_t e = range.flat.begin; e < range.flat.end; ++e) {
        const MeshCoordinate owner = owner_at_.at(static_cast<size_t>(e));
        FSDP_PROMISE(placed.inner != Placement::kShard || owner.inner == rank.inner, "element ", e);
        FSDP_PROMISE(placed.outer != Placement::kShard || owner.outer == rank.outer, "element ", e);
        ++holders[static_cast<size_t>(e)];
        num_held_ += tensor_at_[static_cast<size_t>(e)] >= 0;
        local_at_[static_cast<size_t>(e)] = local++;
      }
      end_before = range.flat.end;
    }
    FSDP_PROMISE(local == layout_.shard_numel(placed, rank), local);
    if (layout_.has_even_shards()) FSDP_PROMISE(local == layout_.max_shard_numel(placed), local);
    return "";
  }

  // The slices of a rank are exactly the tensor elements of its shard, at their local positions.
  std::string check_slices(PlacementPair placed, MeshCoordinate rank) const {
    const std::vector<TensorSlice> slices = layout_.tensor_slices(placed, rank);
    std::vector<TensorSlice> one_by_one;
    for (int64_t t = 0; t < layout_.num_tensors(); ++t) {
      std::ranges::copy(layout_.tensor_slices(placed, rank, t), std::back_inserter(one_by_one));
    }
    std::ranges::stable_sort(one_by_one, {}, &TensorSlice::local_begin);
    FSDP_PROMISE(slices == one_by_one, slices.size(), " and ", one_by_one.size(), " slices");
    int64_t num_in_slices = 0;
    for (const TensorSlice& slice : slices) {
      FSDP_PROMISE(!slice.range.empty(), "tensor ", slice.tensor);
      const int64_t begin = layout_.tensor_range(slice.tensor).begin;
      for (int64_t i = slice.range.begin; i < slice.range.end; ++i) {
        const auto e = static_cast<size_t>(begin + i);
        FSDP_PROMISE(tensor_at_.at(e) == slice.tensor, "element ", e);
        FSDP_PROMISE(local_at_[e] == slice.local_begin + i - slice.range.begin, "element ", e);
      }
      num_in_slices += slice.range.numel();
      if (placed == kBothSharded) {
        const auto& shape = request_.shapes[static_cast<size_t>(slice.tensor)];
        if (std::string problem = check_boxes(shape, slice.range); !problem.empty()) return problem;
      }
    }
    FSDP_PROMISE(num_in_slices == num_held_, num_in_slices);
    return "";
  }

  const FlatLayout& layout_;
  const FlatLayoutRequest& request_;
  std::vector<int64_t> tensor_at_;        // per element: its tensor, or -1 for padding
  std::vector<MeshCoordinate> owner_at_;  // per element: its owner with both axes sharded
  std::vector<int64_t> local_at_;         // per element: position in the shard under test, or -1
  int64_t num_held_ = 0;                  // tensor elements in that shard
};

#undef FSDP_PROMISE

inline std::string check_layout(const FlatLayout& layout) { return LayoutChecker(layout).check(); }

// Reads a request out of arbitrary bytes. Sizes stay small enough to check every element, unless
// the first byte asks for extreme ones, which may be refused with an Error but must do no harm.
class RequestReader {
 public:
  explicit RequestReader(std::span<const uint8_t> bytes) : bytes_(bytes) {}

  bool is_extreme() const { return !bytes_.empty() && bytes_[0] % 8 == 7; }

  FlatLayoutRequest read() {
    const bool extreme = is_extreme();
    next();
    FlatLayoutRequest request;
    constexpr int64_t kElementBytes[] = {1, 2, 4, 8};
    request.element_bytes = kElementBytes[next() % 4];
    request.align_bytes = request.element_bytes << next() % 5;
    request.inner_ranks = 1 + next() % 9;
    request.outer_ranks = next() % 3 == 0 ? 1 + next() % 4 : 1;
    constexpr Granularity kGranularities[] = {Granularity::element(), Granularity::row(),
                                              Granularity::row(), Granularity::tensor()};
    const int64_t choice = next() % 5;
    request.granularity =
        choice == 4 ? Granularity::block(1 + next() % 33) : kGranularities[choice];
    if (extreme) {
      request.element_bytes = wide();
      request.align_bytes = wide();
      request.inner_ranks = wide();
      request.outer_ranks = wide();
      if (choice == 4) request.granularity = Granularity::block(wide());
    }
    const int64_t balanced_by = !extreme && choice == 3 ? next() % 3 : 0;
    const bool has_matrices = balanced_by == 2;
    if (balanced_by == 1) {
      request.held_load.resize(static_cast<size_t>(request.inner_ranks * request.outer_ranks));
      for (int64_t& held : request.held_load) held = next();
    }
    const int64_t num_tensors = next() % 9;
    for (int64_t t = 0; t < num_tensors; ++t) {
      std::vector<int64_t> shape(static_cast<size_t>(has_matrices ? 2 + next() % 3 : next() % 5));
      for (int64_t& size : shape) size = extreme ? wide() : dim(shape.size());
      if (has_matrices) {
        const int64_t rows = shape[shape.size() - 2];
        request.matrix_rows.emplace_back();
        if (rows > 0 && rows % 2 == 0) request.matrix_rows.back() = {rows / 2};
      }
      request.shapes.push_back(shape);
    }
    return request;
  }

 private:
  int64_t next() { return position_ < bytes_.size() ? bytes_[position_++] : 0; }

  // Mostly small numbers and powers of two, now and then 64 bits of anything.
  int64_t wide() {
    const int64_t kind = next();
    if (kind % 4 == 0) return kind / 4;
    if (kind % 4 == 1) return int64_t{1} << kind / 4 % 63;
    uint64_t value = 0;
    const int64_t num_bytes = kind % 4 == 2 ? 8 : 2;
    for (int64_t i = 0; i < num_bytes; ++i) value = value << 8 | static_cast<uint64_t>(next());
    return static_cast<int64_t>(value);
  }

  int64_t dim(size_t num_dims) {
    const int64_t byte = next();
    if (byte % 32 == 31) return 0;
    constexpr int64_t kLargest[] = {1, 150, 24, 8, 5};
    return 1 + byte % kLargest[num_dims];
  }

  std::span<const uint8_t> bytes_;
  size_t position_ = 0;
};

}  // namespace fsdp::testing
