// A rank's part of one flat buffer, seen as tensors, and the storages by which parameters see whole
// weights in it.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Storage.h>
#include <c10/core/TensorImpl.h>

#include <cstdint>
#include <string>
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

// Note [Storage rebinding]
// A parameter and all its views see this storage; docs/engine.md tells why. One storage per
// parameter and not per group: binding costs some nanoseconds each, and the error can name the
// parameter.
//
// Touching an unbound parameter throws. From libtorch 2.13 on the storage itself does, so every
// view throws, too. Older versions cannot take that error back from a storage: there the parameter
// has another storage while it is unbound, which always throws, and views that were made of a bound
// one have no memory.
class ParameterStorage {
 public:
  // `sentence` is the error for touching an unbound parameter.
  ParameterStorage(int64_t num_bytes, c10::Device device, const std::string& sentence);
  ~ParameterStorage();
  ParameterStorage(const ParameterStorage&) = delete;
  ParameterStorage& operator=(const ParameterStorage&) = delete;

  // The memory stays the caller's and must hold num_bytes until unbind().
  void bind(void* address);
  void unbind();
  bool is_bound() const { return is_bound_; }

  // Makes the parameter a contiguous view of the whole storage, bound or not. It stays the same
  // object for all its holders and must outlive this one.
  void attach(const at::Tensor& parameter, at::ScalarType dtype, at::IntArrayRef sizes);

  // Whether the parameter still is a view of this storage: `parameter.data = ...` and set_() give
  // it memory that nobody here knows.
  bool is_attached() const;
  // Whether somebody changed the parameter in place since attach() or expect_changes(). Nothing
  // here moves its version. (A change through `parameter.data` does not, either.)
  bool is_changed() const { return version() != version_; }
  void expect_changes() { version_ = version(); }
  // After unbind(), before libtorch 2.13: if views of the parameter live on, which do not throw,
  // gives them memory full of NaN until the next bind(), and returns true.
  bool give_views_nan();

 private:
  uint32_t version() const;
  bool is_storage(const c10::Storage& storage) const;  // the parameter's
  template <typename Impl>
  void toggle_access(Impl& storage);

  const int64_t num_bytes_;
  const c10::Device device_;
  c10::Storage storage_;
  c10::Storage spare_;  // the other half of a swap, or what an unbound parameter has
  c10::TensorImpl* parameter_ = nullptr;
  at::Tensor nan_;  // what views read that outlive their unit
  uint32_t version_ = 0;
  bool is_bound_ = false;
};

}  // namespace fsdp
