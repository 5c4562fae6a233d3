#include "fsdp/shard/unsharded_storage.h"

#include <ATen/ATen.h>

#include <utility>

#include "fsdp/base/error.h"

namespace fsdp {

namespace {

c10::Storage empty_storage(int64_t num_bytes, c10::Device device) {
  return c10::Storage(c10::Storage::use_byte_size_t(), static_cast<size_t>(num_bytes),
                      c10::DataPtr(nullptr, device), /*allocator=*/nullptr, /*resizable=*/false);
}

}  // namespace

UnshardedStorage::UnshardedStorage(int64_t num_bytes, c10::Device device, std::string sentence)
    : num_bytes_(num_bytes),
      device_(device),
      sentence_(std::move(sentence)),
      storage_(empty_storage(num_bytes, device)),
      spare_(empty_storage(num_bytes, device)) {
  forbid_access();
}

UnshardedStorage::~UnshardedStorage() {
  if (is_bound()) unbind();  // tensors of the user may live on
}

void UnshardedStorage::bind(void* address) {
  FSDP_ASSERT(!is_bound() && (address != nullptr || num_bytes_ == 0), "bound twice or to nothing");
  allow_access();
  storage_.unsafeGetStorageImpl()->set_data_ptr_noswap(c10::DataPtr(address, device_));
  is_bound_ = true;
}

void UnshardedStorage::unbind() {
  storage_.unsafeGetStorageImpl()->set_data_ptr_noswap(c10::DataPtr(nullptr, device_));
  is_bound_ = false;
  forbid_access();
}

at::Tensor UnshardedStorage::view(at::ScalarType dtype, at::IntArrayRef sizes) const {
  at::Tensor tensor = at::detail::make_tensor<c10::TensorImpl>(
      c10::Storage(storage_),
      c10::DispatchKeySet(c10::computeDispatchKey(dtype, std::nullopt, device_)),
      c10::scalarTypeToTypeMeta(dtype));
  tensor.unsafeGetTensorImpl()->set_sizes_contiguous(sizes);
  return tensor;
}

}  // namespace fsdp
