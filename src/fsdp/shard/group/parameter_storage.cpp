#include "fsdp/shard/group/parameter_storage.h"

#include <ATen/ATen.h>

#include <utility>

#include "fsdp/base/check.h"
#include "fsdp/comm/comm_options.h"

namespace fsdp {

namespace {

c10::Storage empty_storage(int64_t num_bytes, c10::Device device) {
  return c10::Storage(c10::Storage::use_byte_size_t(), static_cast<size_t>(num_bytes),
                      c10::DataPtr(nullptr, device), /*allocator=*/nullptr, /*resizable=*/false);
}

// libtorch 2.13 and later.
template <typename Impl>
concept TakesErrorsBack = requires(Impl& storage) {
  storage.swap_data_ptr(storage);
};

}  // namespace

ParameterStorage::ParameterStorage(int64_t num_bytes, c10::Device device, std::string sentence)
    : num_bytes_(num_bytes),
      device_(device),
      sentence_(std::move(sentence)),
      storage_(empty_storage(num_bytes, device)),
      spare_(empty_storage(num_bytes, device)) {
  forbid_access(*storage_.unsafeGetStorageImpl());
}

ParameterStorage::~ParameterStorage() {
  if (is_bound()) unbind();  // tensors of the user may live on
}

void ParameterStorage::bind(void* address) {
  FSDP_ASSERT(!is_bound() && (address != nullptr || num_bytes_ == 0), "bound twice or to nothing");
  c10::StorageImpl& storage = *storage_.unsafeGetStorageImpl();
  allow_access(storage);
  storage.set_data_ptr_noswap(c10::DataPtr(address, device_));
  is_bound_ = true;
}

void ParameterStorage::unbind() {
  c10::StorageImpl& storage = *storage_.unsafeGetStorageImpl();
  storage.set_data_ptr_noswap(c10::DataPtr(nullptr, device_));
  is_bound_ = false;
  forbid_access(storage);
}

// If errors can be taken back, the message is set once and stays with the storage. Swapping with
// the spare only moves whether it is thrown (and the data pointer, which bind() sets): setting and
// clearing the message each time would copy the sentence twice per unit and step.
template <typename Impl>
void ParameterStorage::forbid_access(Impl& storage) {
  if constexpr (TakesErrorsBack<Impl>) {
    if (spare_is_ready_) return storage.swap_data_ptr(*spare_.unsafeGetStorageImpl());
    storage.release_data_and_set_meta_custom_data_ptr_error_msg_(sentence_);
  } else {
    if (!CommOptions::from_environment().checked) return;
    // Bytes 0xFF are NaN in every floating type.
    if (!spare_is_ready_)
      spare_ = at::full({num_bytes_}, 0xFF, at::device(device_).dtype(at::kByte)).storage();
    storage.set_data_ptr_noswap(c10::DataPtr(spare_.mutable_data(), device_));
  }
  spare_is_ready_ = true;
}

template <typename Impl>
void ParameterStorage::allow_access(Impl& storage) {
  if constexpr (TakesErrorsBack<Impl>) storage.swap_data_ptr(*spare_.unsafeGetStorageImpl());
}

at::Tensor ParameterStorage::view(at::ScalarType dtype, at::IntArrayRef sizes) const {
  at::Tensor tensor = at::detail::make_tensor<c10::TensorImpl>(
      c10::Storage(storage_),
      c10::DispatchKeySet(c10::computeDispatchKey(dtype, std::nullopt, device_)),
      c10::scalarTypeToTypeMeta(dtype));
  tensor.unsafeGetTensorImpl()->set_sizes_contiguous(sizes);
  return tensor;
}

}  // namespace fsdp
