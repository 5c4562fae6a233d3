// The storage behind one parameter: bound to memory while its unit is gathered.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Storage.h>

#include <cstdint>
#include <string>

namespace fsdp {

// Note [Storage rebinding]
// A parameter is a view of this storage, and so is whatever autograd saved of it (a transposed
// weight, say). Unsharding binds the storage to its place in a slab, resharding takes the slab
// away; all views follow, nothing is copied, and no version counter moves, because gathers write
// through other tensors. Forward and backward of one unit may use different slabs.
//
// One storage per parameter and not per group: binding costs some nanoseconds each, and the error
// below can name the parameter.
//
// While nothing is bound, touching the parameter is an error, where libtorch can do that (2.13:
// throwing_access.cpp). Older versions cannot take such an error back, so there the views read NaN
// instead (poisoned_access.cpp).
class UnshardedStorage {
 public:
  // `sentence` is what touching an unbound parameter says.
  UnshardedStorage(int64_t num_bytes, c10::Device device, std::string sentence);
  ~UnshardedStorage();
  UnshardedStorage(const UnshardedStorage&) = delete;
  UnshardedStorage& operator=(const UnshardedStorage&) = delete;

  // The memory stays the caller's and must hold num_bytes until unbind().
  void bind(void* address);
  void unbind();
  bool is_bound() const { return is_bound_; }

  // A contiguous tensor of all of it; may be made while nothing is bound.
  at::Tensor view(at::ScalarType dtype, at::IntArrayRef sizes) const;

 private:
  // What a view reads while nothing is bound; one implementation per libtorch, chosen by CMake.
  void forbid_access();
  void allow_access();

  const int64_t num_bytes_;
  const c10::Device device_;
  const std::string sentence_;
  c10::Storage storage_;
  // The other half of a swap (throwing_access.cpp), or the memory full of NaN
  // (poisoned_access.cpp).
  c10::Storage spare_;
  bool spare_is_ready_ = false;
  bool is_bound_ = false;
};

}  // namespace fsdp
