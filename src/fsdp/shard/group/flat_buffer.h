// A rank's part of one flat buffer: memory, type and placement, seen as tensors.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "fsdp/layout/flat_layout.h"
#include "fsdp/memory/slab_allocator.h"

namespace fsdp {

struct FlatBufferSpec {
  PlacementPair placed;  // how the whole is spread over the mesh
  MeshCoordinate rank;   // whose part this is
  at::ScalarType dtype;  // of the elements
  c10::Device device;    // where the allocator's memory is
};

// Knows where each element of the whole lies in its memory. The layout must outlive it. Memory may
// come and go; tensors from before must not be used after it went.
class FlatBuffer {
 public:
  // Without an allocator for memory that somebody else owns (lie_at).
  FlatBuffer(const FlatLayout& layout, const FlatBufferSpec& spec,
             SlabAllocator* allocator = nullptr);

  // Sets only the padding, to 0, because it takes part in reductions and updates.
  void allocate();
  void release();
  // Uses memory that somebody else owns, as it is.
  void lie_at(void* address);
  bool is_allocated() const { return is_allocated_; }

  int64_t numel() const { return numel_; }
  const FlatBufferSpec& spec() const { return spec_; }
  at::ScalarType dtype() const { return spec_.dtype; }

  // This rank's whole part, one-dimensional; the same tensor as long as memory comes back at the
  // same address.
  const at::Tensor& local() const { return local_; }

  // Elements [begin, end) of the whole, which must lie in this rank's part.
  at::Tensor at(FlatRange range) const;

  // This rank's part of tensor `index`, one-dimensional; it may be empty.
  at::Tensor part_of(int64_t index) const;

  // Copies this rank's part of a whole tensor's value, which may be of another dtype.
  void set(int64_t index, const at::Tensor& whole);

 private:
  const FlatLayout& layout_;
  const FlatBufferSpec spec_;
  const int64_t numel_;
  const std::vector<ShardRange> ranges_;  // of this rank's part
  const std::vector<FlatRange> padding_;
  SlabAllocator* const allocator_;
  Slab slab_;
  at::Tensor local_;  // over the current or the last memory
  bool is_allocated_ = false;
};

// A one-dimensional tensor over memory that somebody else owns.
at::Tensor tensor_over(void* address, int64_t numel, at::ScalarType dtype, c10::Device device);

// The ranges of a rank's part that belong to no tensor, in elements of the whole.
std::vector<FlatRange> padding_ranges(const FlatLayout& layout, PlacementPair placed,
                                      MeshCoordinate rank);

}  // namespace fsdp
