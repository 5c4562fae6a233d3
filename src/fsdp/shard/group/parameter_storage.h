// The storage behind one parameter: bound to memory while its unit is gathered.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Storage.h>
#include <c10/core/TensorImpl.h>

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
