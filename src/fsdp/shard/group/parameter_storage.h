// The storage behind one parameter: bound to memory while its unit is gathered.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Storage.h>

#include <cstdint>
#include <string>

namespace fsdp {

// Note [Storage rebinding]
// A parameter is a view of this storage, and so is everything that autograd saved of it (a
// transposed weight, say). Unsharding binds the storage to its place in a slab, resharding unbinds
// it; all views follow, nothing is copied, and no version counter moves, because gathers write
// through other tensors. Forward and backward of one unit may use different slabs.
//
// One storage per parameter and not per group: binding costs some nanoseconds each, and the error
// below can name the parameter.
//
// Touching an unbound parameter throws, if libtorch can take such an error back (2.13 and later).
// With older versions an unbound parameter reads NaN in checked mode, and has no memory otherwise.
class ParameterStorage {
 public:
  // `sentence` is the error for touching an unbound parameter.
  ParameterStorage(int64_t num_bytes, c10::Device device, std::string sentence);
  ~ParameterStorage();
  ParameterStorage(const ParameterStorage&) = delete;
  ParameterStorage& operator=(const ParameterStorage&) = delete;

  // The memory stays the caller's and must hold num_bytes until unbind().
  void bind(void* address);
  void unbind();
  bool is_bound() const { return is_bound_; }

  // A contiguous tensor over the whole storage; may be made while nothing is bound.
  at::Tensor view(at::ScalarType dtype, at::IntArrayRef sizes) const;

 private:
  template <typename Impl>
  void forbid_access(Impl& storage);
  template <typename Impl>
  void allow_access(Impl& storage);

  const int64_t num_bytes_;
  const c10::Device device_;
  const std::string sentence_;
  c10::Storage storage_;
  c10::Storage spare_;  // the other half of a swap, or memory full of NaN
  bool spare_is_ready_ = false;
  bool is_bound_ = false;
};

}  // namespace fsdp
