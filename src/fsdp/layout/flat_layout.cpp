#include "fsdp/layout/flat_layout.h"

#include <algorithm>
#include <map>
#include <utility>

#include "fsdp/base/check.h"
#include "fsdp/base/integer.h"
#include "fsdp/base/text.h"
#include "fsdp/layout/matrix_owners.h"
#include "fsdp/layout/packing.h"

namespace fsdp {

namespace {

constexpr int64_t kMaxRanks = int64_t{1} << 24;
// So that byte sizes of any buffer with this layout (elements of up to 16 bytes) fit 64 bits.
constexpr int64_t kMaxNumel = INT64_MAX / 16;

void check_request(const FlatLayoutRequest& request) {
  FSDP_CHECK(request.element_bytes > 0, "element_bytes is ", request.element_bytes,
             "; give the size of one element, 1 or more");
  FSDP_CHECK(request.align_bytes > 0 && request.align_bytes % request.element_bytes == 0,
             "align_bytes is ", request.align_bytes, ", which is not a multiple of element_bytes ",
             request.element_bytes, "; choose a multiple of it, such as 128");
  FSDP_CHECK(request.inner_ranks >= 1 && request.inner_ranks <= kMaxRanks, "inner_ranks is ",
             request.inner_ranks, "; use 1 to ", kMaxRanks);
  FSDP_CHECK(request.outer_ranks >= 1 && request.outer_ranks <= kMaxRanks / request.inner_ranks,
             "outer_ranks is ", request.outer_ranks, "; use 1 to ", kMaxRanks / request.inner_ranks,
             " together with inner_ranks ", request.inner_ranks);
  if (request.granularity.kind == Granularity::Kind::kBlock) {
    FSDP_CHECK(request.granularity.block_numel >= 1, "granularity block has ",
               request.granularity.block_numel, " elements; use 1 or more");
  }
  // Groups set the others, no user does.
  const auto num_held = static_cast<int64_t>(request.held_load.size());
  FSDP_ASSERT(num_held == 0 || num_held == request.inner_ranks * request.outer_ranks);
  FSDP_ASSERT(num_held == 0 || request.matrix_rows.empty());
  FSDP_ASSERT(request.matrix_rows.empty() || request.matrix_rows.size() == request.shapes.size());
  FSDP_ASSERT(request.matrix_owners.empty() ||
              request.matrix_owners.size() == request.matrix_rows.size());
}

// The product of the dims. A dim of 0 wins over dims that would overflow together.
int64_t numel_of(size_t tensor, std::span<const int64_t> shape) {
  for (size_t d = 0; d < shape.size(); ++d) {
    FSDP_CHECK(shape[d] >= 0, "dim ", d, " of tensor ", tensor, " with shape ", list_text(shape),
               " is negative; sizes are 0 or more");
  }
  if (std::find(shape.begin(), shape.end(), 0) != shape.end()) return 0;
  int64_t numel = 1;
  for (const int64_t size : shape) {
    FSDP_CHECK(size <= kMaxNumel / numel, "tensor ", tensor, " with shape ", list_text(shape),
               " has more than ", kMaxNumel, " elements; split it");
    numel *= size;
  }
  return numel;
}

std::vector<BrickedTensor> bricked_tensors(const FlatLayoutRequest& request) {
  std::vector<BrickedTensor> result;
  const int64_t align_numel = request.align_bytes / request.element_bytes;
  for (size_t i = 0; i < request.shapes.size(); ++i) {
    const int64_t numel = numel_of(i, request.shapes[i]);
    if (numel == 0) continue;
    result.push_back(bricked(static_cast<int64_t>(i), numel,
                             indivisible_numel(request.granularity, request.shapes[i]),
                             align_numel));
  }
  return result;
}

// One tensor after another in the order given, each at a multiple of unit_numel, as is the share.
Packing pack_in_order(std::span<const BrickedTensor> tensors, const FlatLayoutRequest& request,
                      int64_t unit_numel) {
  Packing packing{.offsets = std::vector<int64_t>(request.shapes.size(), 0), .segments = {}};
  int64_t at = 0;
  for (const BrickedTensor& tensor : tensors) {
    packing.offsets[static_cast<size_t>(tensor.tensor)] = at;
    at = round_up(checked_add(at, tensor.numel), unit_numel);
  }
  const int64_t num_shares = request.inner_ranks * request.outer_ranks;
  const int64_t share_numel = round_up(ceil_div(at, num_shares), unit_numel);
  packing.segments.push_back(Segment::even(0, share_numel, num_shares));
  return packing;
}

Packing plan(const FlatLayoutRequest& request) {
  const std::vector<BrickedTensor> tensors = bricked_tensors(request);
  const auto num_tensors = static_cast<int64_t>(request.shapes.size());
  const int64_t align_numel = request.align_bytes / request.element_bytes;
  switch (request.granularity.kind) {
    case Granularity::Kind::kElement:
      return pack_in_order(tensors, request, align_numel);
    case Granularity::Kind::kBlock:
      return pack_in_order(tensors, request,
                           checked_lcm(align_numel, request.granularity.block_numel));
    case Granularity::Kind::kRow:
      return pack_rows(tensors, num_tensors, align_numel,
                       request.inner_ranks * request.outer_ranks);
    case Granularity::Kind::kTensor: {
      const MeshShape mesh{.outer = request.outer_ranks, .inner = request.inner_ranks};
      if (!request.matrix_rows.empty()) return pack_matrices(tensors, request);
      return balance_tensors(tensors, num_tensors, mesh, request.held_load);
    }
  }
  return {};
}

// The shares [first, last) of every segment that a rank holds; several only for Shard outer with a
// whole inner axis, where the outer part of each inner shard is a piece of its own.
struct ShareSpan {
  int64_t first = 0;
  int64_t last = 0;
  int64_t stride = 0;  // from one piece to the next
  int64_t num_pieces = 1;
};

ShareSpan shares_of(PlacementPair placed, MeshCoordinate rank, MeshShape mesh) {
  const bool cut_inner = placed.inner == Placement::kShard && mesh.inner > 1;
  const bool cut_outer = placed.outer == Placement::kShard && mesh.outer > 1;
  if (cut_outer && !cut_inner) {
    return {rank.outer, rank.outer + 1, mesh.outer, mesh.inner};
  }
  const int64_t first_inner = cut_inner ? rank.inner : 0;
  const int64_t last_inner = cut_inner ? rank.inner + 1 : mesh.inner;
  const int64_t first = first_inner * mesh.outer;
  if (cut_outer) return {first + rank.outer, first + rank.outer + 1, 0, 1};
  return {first, last_inner * mesh.outer, 0, 1};
}

}  // namespace

FlatLayout::FlatLayout(FlatLayoutRequest request) : request_(std::move(request)) {
  check_request(request_);
  FlatLayoutRequest* const own = &request_;
  if (request_.matrix_owners.empty()) deal_matrices({&own, 1});
  Packing packing = plan(request_);
  segments_ = std::move(packing.segments);
  FSDP_CHECK(padded_numel() <= kMaxNumel, "the group needs ", padded_numel(),
             " elements with padding, more than ", kMaxNumel, "; split it into several groups");
  for (size_t i = 0; i < request_.shapes.size(); ++i) {
    const int64_t numel = numel_of(i, request_.shapes[i]);
    tensors_.push_back({packing.offsets[i], packing.offsets[i] + numel});
    tensor_numel_ += numel;
    if (numel > 0) by_position_.push_back(static_cast<int64_t>(i));
  }
  std::sort(by_position_.begin(), by_position_.end(),
            [this](int64_t a, int64_t b) { return tensor_range(a).begin < tensor_range(b).begin; });
  validate();
}

FlatLayout FlatLayout::in_blocks_of(int64_t numel) const {
  FSDP_ASSERT(numel > 0 && align_numel() % numel == 0, "blocks of ", numel, " in steps of ",
              align_numel());
  FlatLayout blocks;
  blocks.request_ = request_;
  blocks.request_.element_bytes = 1;
  blocks.request_.align_bytes = align_numel() / numel;
  blocks.request_.granularity = Granularity::element();
  blocks.request_.matrix_rows.clear();
  blocks.request_.matrix_owners.clear();
  blocks.by_position_ = by_position_;
  blocks.tensor_numel_ = tensor_numel_ / numel;
  for (size_t i = 0; i < tensors_.size(); ++i) {
    FSDP_ASSERT(tensors_[i].numel() % numel == 0, "tensor ", i, " ends inside a block of ", numel);
    blocks.request_.shapes[i] = {tensors_[i].numel() / numel};
    blocks.tensors_.push_back({tensors_[i].begin / numel, tensors_[i].end / numel});
  }
  for (const Segment& segment : segments_) blocks.segments_.push_back(segment.in_blocks_of(numel));
  return blocks;
}

FlatRange FlatLayout::tensor_range(int64_t tensor) const {
  return tensors_.at(static_cast<size_t>(tensor));
}

int64_t FlatLayout::padded_numel() const {
  return segments_.empty() ? 0 : segments_.back().range().end;
}

int64_t FlatLayout::lower_bound_numel() const {
  const std::vector<BrickedTensor> tensors = bricked_tensors(request_);
  if (!has_even_shards()) {
    int64_t volume = 0;
    for (const BrickedTensor& tensor : tensors) volume += tensor.numel;
    return volume;
  }
  const int64_t num_ranks = request_.inner_ranks * request_.outer_ranks;
  return checked_mul(min_shard_numel(tensors, align_numel(), num_ranks), num_ranks);
}

std::vector<OwnedMatrix> FlatLayout::matrices_of(int64_t tensor) const {
  const auto index = static_cast<size_t>(tensor);
  return matrix_parts(request_.shapes.at(index), request_.matrix_rows.at(index));
}

bool FlatLayout::has_even_shards() const {
  return std::all_of(segments_.begin(), segments_.end(),
                     [](const Segment& segment) { return segment.is_even(); });
}

void FlatLayout::check_rank(MeshCoordinate rank) const {
  FSDP_CHECK(0 <= rank.inner && rank.inner < request_.inner_ranks, "inner rank ", rank.inner,
             " does not exist; this layout has inner_ranks ", request_.inner_ranks);
  FSDP_CHECK(0 <= rank.outer && rank.outer < request_.outer_ranks, "outer rank ", rank.outer,
             " does not exist; this layout has outer_ranks ", request_.outer_ranks);
}

std::vector<ShardRange> FlatLayout::shard_ranges(PlacementPair placed, MeshCoordinate rank) const {
  check_rank(rank);
  const ShareSpan span = shares_of(placed, rank, mesh());
  std::vector<ShardRange> ranges;
  int64_t local = 0;
  for (size_t i = 0; i < segments_.size(); ++i) {
    for (int64_t piece = 0; piece < span.num_pieces; ++piece) {
      const int64_t skipped = piece * span.stride;
      const FlatRange flat = segments_[i].shares(span.first + skipped, span.last + skipped);
      if (flat.empty()) continue;
      ranges.push_back({.flat = flat, .local_begin = local, .segment = static_cast<int64_t>(i)});
      local += flat.numel();
    }
  }
  return ranges;
}

int64_t FlatLayout::shard_numel(PlacementPair placed, MeshCoordinate rank) const {
  if (has_even_shards()) {
    check_rank(rank);
    return max_shard_numel(placed);
  }
  const std::vector<ShardRange> ranges = shard_ranges(placed, rank);
  return ranges.empty() ? 0 : ranges.back().local_begin + ranges.back().flat.numel();
}

int64_t FlatLayout::max_shard_numel(PlacementPair placed) const {
  if (has_even_shards()) return padded_numel() / num_shards(placed, mesh());
  // Shares of the ranks that hold the same are added up; most ranks may have none.
  const MeshShape ranks = mesh();
  std::map<std::pair<int64_t, int64_t>, int64_t> numel_by_rank;
  for (const Segment& segment : segments_) {
    for (const Segment::UnevenShare& share : segment.uneven_shares()) {
      const int64_t inner = placed.inner == Placement::kShard ? share.index / ranks.outer : 0;
      const int64_t outer = placed.outer == Placement::kShard ? share.index % ranks.outer : 0;
      numel_by_rank[{inner, outer}] += share.numel;
    }
  }
  int64_t max_numel = 0;
  for (const auto& [rank, numel] : numel_by_rank) max_numel = std::max(max_numel, numel);
  return max_numel;
}

std::vector<TensorSlice> FlatLayout::tensor_slices(PlacementPair placed,
                                                   MeshCoordinate rank) const {
  std::vector<TensorSlice> slices;
  for (const ShardRange& shard : shard_ranges(placed, rank)) {
    auto it = std::partition_point(by_position_.begin(), by_position_.end(), [&](int64_t tensor) {
      return tensor_range(tensor).end <= shard.flat.begin;
    });
    for (; it != by_position_.end() && tensor_range(*it).begin < shard.flat.end; ++it)
      slices.push_back(slice_of(*it, shard));
  }
  return slices;
}

std::vector<TensorSlice> FlatLayout::tensor_slices(PlacementPair placed, MeshCoordinate rank,
                                                   int64_t tensor) const {
  std::vector<TensorSlice> slices;
  for (const ShardRange& shard : shard_ranges(placed, rank))
    if (!intersect(tensor_range(tensor), shard.flat).empty())
      slices.push_back(slice_of(tensor, shard));
  return slices;
}

TensorSlice FlatLayout::slice_of(int64_t tensor, const ShardRange& shard) const {
  const FlatRange whole = tensor_range(tensor);
  const FlatRange common = intersect(whole, shard.flat);
  return {.tensor = tensor,
          .range = {common.begin - whole.begin, common.end - whole.begin},
          .local_begin = shard.local_begin + common.begin - shard.flat.begin};
}

const Segment& FlatLayout::segment_at(int64_t position) const {
  const auto it =
      std::partition_point(segments_.begin(), segments_.end(),
                           [&](const Segment& segment) { return segment.range().end <= position; });
  FSDP_ASSERT(it != segments_.end(), "position ", position);
  return *it;
}

// Every reader of a layout may rely on this, checked once.
void FlatLayout::validate() const {
  int64_t position = 0;
  for (const Segment& segment : segments_) {
    FSDP_ASSERT(segment.range().begin == position, "segments leave a hole at ", position);
    if (segment.is_even()) {
      FSDP_ASSERT(segment.share_numel() % align_numel() == 0, "share ", segment.share_numel());
    }
    position = segment.range().end;
  }
  int64_t end_before = 0;
  for (const int64_t tensor : by_position_) {
    const FlatRange range = tensor_range(tensor);
    FSDP_ASSERT(range.begin >= end_before, "tensor ", tensor, " overlaps another one");
    FSDP_ASSERT(range.begin % align_numel() == 0, "tensor ", tensor, " begins at ", range.begin);
    FSDP_ASSERT(range.end <= segment_at(range.begin).range().end, "tensor ", tensor,
                " leaves its segment at ", range.end);
    validate_cuts(static_cast<size_t>(tensor));
    end_before = range.end;
  }
}

void FlatLayout::validate_cuts(size_t tensor) const {
  const Segment& segment = segment_at(tensors_[tensor].begin);
  if (!segment.is_even()) return;  // shares of whole tensors by construction
  const int64_t share_numel = segment.share_numel();
  const int64_t numel = tensors_[tensor].numel();
  const int64_t piece = indivisible_numel(request_.granularity, request_.shapes[tensor]);
  const int64_t first_cut =
      share_numel - (tensors_[tensor].begin - segment.range().begin) % share_numel;
  if (first_cut >= numel) return;
  FSDP_ASSERT(first_cut % piece == 0, "tensor ", tensor, " is cut at ", first_cut);
  if (numel - first_cut <= share_numel) return;
  FSDP_ASSERT(share_numel % piece == 0, "tensor ", tensor, " is cut every ", share_numel);
}

std::vector<OwnedMatrix> matrices_in(const FlatLayout& layout, std::span<const ShardRange> ranges) {
  std::vector<OwnedMatrix> found;
  if (layout.request().matrix_rows.empty()) return found;
  for (const ShardRange& range : ranges)
    for (int64_t tensor = 0; tensor < layout.num_tensors(); ++tensor) {
      const FlatRange whole = layout.tensor_range(tensor);
      if (intersect(whole, range.flat).empty()) continue;
      for (const OwnedMatrix& matrix : layout.matrices_of(tensor)) {
        const int64_t at = whole.begin + matrix.range.begin;
        if (at >= range.flat.begin && at < range.flat.end) found.push_back(matrix);
      }
    }
  return found;
}

FlatRange held_range(const FlatLayout& layout, const Segment& segment, PlacementPair placed,
                     MeshCoordinate rank) {
  const int64_t outer_ranks = layout.mesh().outer;
  const int64_t num_shares = outer_ranks * layout.mesh().inner;
  if (placed.inner != Placement::kShard) return segment.shares(0, num_shares);
  const int64_t first = rank.inner * outer_ranks;
  if (placed.outer != Placement::kShard) return segment.shares(first, first + outer_ranks);
  return segment.shares(first + rank.outer, first + rank.outer + 1);
}

}  // namespace fsdp
