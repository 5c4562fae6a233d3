// Where each tensor of a parameter group lies in one flat buffer, and which rank owns which part.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "fsdp/layout/segment.h"
#include "fsdp/layout/strategy.h"

namespace fsdp {

// A tensor of two or more dims is a column of matrices with as many columns as its last dim.
struct OwnedMatrix {
  FlatRange range;  // in the flattened tensor
  int64_t rows = 0;
  int64_t columns = 0;

  friend bool operator==(const OwnedMatrix&, const OwnedMatrix&) = default;
};

// `rows` are those of the matrices from the top, again and again until the tensor ends: a gate and
// an up projection in one tensor, or the experts of a bank, are matrices of their own. Empty: one
// matrix, or one for each index of the dims before the last two.
std::vector<OwnedMatrix> matrix_parts(std::span<const int64_t> shape,
                                      std::span<const int64_t> rows);

// The products of one Newton-Schulz iteration, in flops: with the shorter side m and the longer one
// n, X X^T and B X take 2 m m n each, and A A takes 2 m m m.
int64_t newton_schulz_flops(int64_t rows, int64_t columns);

// Numbers that an iteration has in memory: X twice, A and B.
int64_t newton_schulz_numel(int64_t rows, int64_t columns);

struct FlatLayoutRequest {
  std::vector<std::vector<int64_t>> shapes;  // of the group's tensors; [] is a scalar
  int64_t element_bytes = 0;                 // the smallest one of all buffers with this layout
  int64_t inner_ranks = 1;                   // ranks of the axis that is cut first
  int64_t outer_ranks = 1;                   // ranks that share an inner shard among them
  int64_t align_bytes = 128;                 // every tensor and every shard starts at a multiple
  Granularity granularity = Granularity::element();  // where a shard may end inside a tensor
  // Granularity `tensor`: for each tensor the rows of its matrices (matrix_parts()), which have an
  // owner each. Empty: tensors are owned whole.
  std::vector<std::vector<int64_t>> matrix_rows = {};
  // With matrix_rows: for each matrix of each tensor its share (inner_rank * outer_ranks +
  // outer_rank). deal_matrices() chooses them for all groups of a model; empty: for this one alone.
  std::vector<std::vector<int64_t>> matrix_owners = {};
  // Whole tensors: elements that each share's owner holds of the model's other groups, so that
  // groups even each other out; empty: nothing yet.
  std::vector<int64_t> held_load = {};
};

// A contiguous piece of one rank's shard.
struct ShardRange {
  FlatRange flat;           // in the unsharded buffer
  int64_t local_begin = 0;  // in the rank's shard
  int64_t segment = 0;      // index in segments()

  friend bool operator==(const ShardRange&, const ShardRange&) = default;
};

// The part of one tensor that lies in one ShardRange.
struct TensorSlice {
  int64_t tensor = 0;       // index in the request
  FlatRange range;          // in the flattened tensor; boxes() makes n-D boxes of it
  int64_t local_begin = 0;  // in the rank's shard

  friend bool operator==(const TensorSlice&, const TensorSlice&) = default;
};

// Immutable; every rank that is given the same request computes the same layout.
//
// The buffer is one or several segments, each cut into inner_ranks * outer_ranks shares: share
// inner_rank * outer_ranks + outer_rank belongs to that rank. A shard is the concatenation of the
// rank's part of every segment, so that a gather is one all-gather per segment, straight from the
// shard into the buffer. All positions count elements.
class FlatLayout {
 public:
  // Error for a request that makes no sense or does not fit 64 bits.
  explicit FlatLayout(FlatLayoutRequest request);

  // These cuts for a buffer with one element where this one has `numel`, which divides the
  // alignment and every tensor: scales of blocks, or bytes of several codes each.
  FlatLayout in_blocks_of(int64_t numel) const;

  const FlatLayoutRequest& request() const { return request_; }
  MeshShape mesh() const { return {.outer = request_.outer_ranks, .inner = request_.inner_ranks}; }
  int64_t align_numel() const { return request_.align_bytes / request_.element_bytes; }

  int64_t num_tensors() const { return static_cast<int64_t>(tensors_.size()); }
  // Where the tensor lies in the unsharded buffer; [0, 0) for one without elements.
  FlatRange tensor_range(int64_t tensor) const;

  int64_t tensor_numel() const { return tensor_numel_; }  // sum over the tensors
  int64_t padded_numel() const;                           // length of the unsharded buffer
  // No layout with this request's granularity, alignment and equal shards is shorter than this
  // (with granularity `tensor`, where shards may differ: none at all).
  int64_t lower_bound_numel() const;

  std::span<const Segment> segments() const { return segments_; }
  // The matrices of a tensor, for a request with matrix_rows.
  std::vector<OwnedMatrix> matrices_of(int64_t tensor) const;
  // False for granularity `tensor`: then ranks hold shards of different lengths, even none.
  bool has_even_shards() const;

  // The ranges that a rank holds under these placements, in the order of its shard: one range per
  // segment (none where it is empty), but outer_ranks-strided pieces for Shard outer and whole
  // inner.
  std::vector<ShardRange> shard_ranges(PlacementPair placed, MeshCoordinate rank) const;
  int64_t shard_numel(PlacementPair placed, MeshCoordinate rank) const;
  int64_t max_shard_numel(PlacementPair placed) const;

  // Every tensor's part in the rank's shard, in the order of the shard; of one tensor only.
  std::vector<TensorSlice> tensor_slices(PlacementPair placed, MeshCoordinate rank) const;
  std::vector<TensorSlice> tensor_slices(PlacementPair placed, MeshCoordinate rank,
                                         int64_t tensor) const;

 private:
  FlatLayout() = default;

  TensorSlice slice_of(int64_t tensor, const ShardRange& shard) const;
  void validate() const;
  void validate_cuts(size_t tensor) const;
  const Segment& segment_at(int64_t position) const;
  void check_rank(MeshCoordinate rank) const;

  FlatLayoutRequest request_;
  std::vector<FlatRange> tensors_;
  std::vector<int64_t> by_position_;  // tensors with elements, in the order of the buffer
  std::vector<Segment> segments_;
  int64_t tensor_numel_ = 0;
};

// The matrices that lie in some ranges of a layout's buffer, none of which is cut; none where the
// request has no matrix_rows.
std::vector<OwnedMatrix> matrices_in(const FlatLayout& layout, std::span<const ShardRange> ranges);

// The part of a segment that a rank holds under a placement ("RR" all of it, "RS" an inner share,
// "SS" an outer share of that).
FlatRange held_range(const FlatLayout& layout, const Segment& segment, PlacementPair placed,
                     MeshCoordinate rank);

}  // namespace fsdp
