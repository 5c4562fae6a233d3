#include "fsdp/shard/group/parameter_storage.h"

#include <ATen/ATen.h>

#include <utility>

#include "fsdp/base/check.h"

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

ParameterStorage::ParameterStorage(int64_t num_bytes, c10::Device device,
                                   const std::string& sentence)
    : num_bytes_(num_bytes),
      device_(device),
      storage_(empty_storage(num_bytes, device)),
      spare_(empty_storage(num_bytes, device)) {
  c10::StorageImpl& throws = TakesErrorsBack<c10::StorageImpl> ? *storage_.unsafeGetStorageImpl()
                                                               : *spare_.unsafeGetStorageImpl();
  throws.release_data_and_set_meta_custom_data_ptr_error_msg_(sentence);
}

ParameterStorage::~ParameterStorage() {
  if (is_bound()) unbind();  // tensors of the user may live on
}

void ParameterStorage::bind(void* address) {
  FSDP_ASSERT(!is_bound() && (address != nullptr || num_bytes_ == 0), "bound twice or to nothing");
  is_bound_ = true;
  nan_ = at::Tensor();
  toggle_access(*storage_.unsafeGetStorageImpl());
  storage_.unsafeGetStorageImpl()->set_data_ptr_noswap(c10::DataPtr(address, device_));
}

void ParameterStorage::unbind() {
  is_bound_ = false;
  storage_.unsafeGetStorageImpl()->set_data_ptr_noswap(c10::DataPtr(nullptr, device_));
  toggle_access(*storage_.unsafeGetStorageImpl());
}

// Where errors can be taken back, the message is set once and stays with the storage. Swapping with
// the spare only moves whether it is thrown (and the data pointer, which bind() sets): setting and
// clearing the message each time would copy the sentence twice per unit and step.
template <typename Impl>
void ParameterStorage::toggle_access(Impl& storage) {
  if constexpr (TakesErrorsBack<Impl>) {
    storage.swap_data_ptr(*spare_.unsafeGetStorageImpl());
  } else if (parameter_ != nullptr) {
    const c10::Storage& before = is_bound_ ? spare_ : storage_;
    if (is_storage(before))  // the user may have given it another
      parameter_->set_storage_keep_dtype(is_bound_ ? storage_ : spare_);
  }
}

void ParameterStorage::attach(const at::Tensor& parameter, at::ScalarType dtype,
                              at::IntArrayRef sizes) {
  const bool is_spare = !is_bound_ && !TakesErrorsBack<c10::StorageImpl>;
  const at::Tensor view = at::detail::make_tensor<c10::TensorImpl>(
      c10::Storage(is_spare ? spare_ : storage_),
      c10::DispatchKeySet(c10::computeDispatchKey(dtype, std::nullopt, device_)),
      c10::scalarTypeToTypeMeta(dtype));
  view.unsafeGetTensorImpl()->set_sizes_contiguous(sizes);
  // Does what Tensor::set_data does, without its check that both are on one kind of device: a
  // parameter that was made on the meta device becomes a real one.
  parameter_ = parameter.unsafeGetTensorImpl();
  parameter_->shallow_copy_from(view.getIntrusivePtr());
  parameter_->set_allow_tensor_metadata_change(true);  // which what detach() returns does not
  expect_changes();
}

bool ParameterStorage::is_attached() const {
  const bool is_spare = !is_bound_ && !TakesErrorsBack<c10::StorageImpl>;
  return parameter_ != nullptr && is_storage(is_spare ? spare_ : storage_);
}

// Not is_alias_of(), which touches the data.
bool ParameterStorage::is_storage(const c10::Storage& storage) const {
  return parameter_->unsafe_storage().unsafeGetStorageImpl() == storage.unsafeGetStorageImpl();
}

uint32_t ParameterStorage::version() const {
  return parameter_ == nullptr || parameter_->is_inference()
             ? 0
             : parameter_->version_counter().current_version();
}

bool ParameterStorage::give_views_nan() {
  if (TakesErrorsBack<c10::StorageImpl> || is_bound_ || storage_.use_count() == 1) return false;
  // All bits are set in a NaN of every floating type.
  nan_ = at::full({num_bytes_}, 0xff, at::device(device_).dtype(at::kByte));
  storage_.unsafeGetStorageImpl()->set_data_ptr_noswap(
      c10::DataPtr(nan_.mutable_data_ptr(), device_));
  return true;
}

}  // namespace fsdp
