#include "fsdp/shard/group/flat_buffer.h"

#include <ATen/ATen.h>
#include <c10/core/InferenceMode.h>

#include <algorithm>
#include <utility>

#include "fsdp/base/check.h"
#include "fsdp/layout/flat_layout.h"

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

at::Tensor tensor_over(void* address, int64_t numel, at::ScalarType dtype, c10::Device device) {
  // Buffers are made when they are first needed, which may be in an evaluation.
  const c10::InferenceMode for_training_too(false);
  // An empty slab has no address, so no tensor can be made over it.
  if (numel == 0) return at::empty({0}, at::TensorOptions().dtype(dtype).device(device));
  return at::for_blob(address, {numel})
      .options(at::TensorOptions().dtype(dtype).device(device))
      .target_device(device)  // otherwise libtorch asks the driver whose memory it is
      .make_tensor();
}

std::vector<FlatRange> padding_ranges(const FlatLayout& layout, PlacementPair placed,
                                      MeshCoordinate rank) {
  std::vector<FlatRange> tensors;
  for (int64_t i = 0; i < layout.num_tensors(); ++i)
    if (!layout.tensor_range(i).empty()) tensors.push_back(layout.tensor_range(i));
  std::sort(tensors.begin(), tensors.end(),
            [](FlatRange a, FlatRange b) { return a.begin < b.begin; });
  std::vector<FlatRange> padding;
  for (const ShardRange& held : layout.shard_ranges(placed, rank)) {
    int64_t covered = held.flat.begin;
    for (const FlatRange& tensor : tensors) {
      const FlatRange common = intersect(tensor, held.flat);
      if (common.empty()) continue;
      if (common.begin > covered) padding.push_back({covered, common.begin});
      covered = common.end;
    }
    if (covered < held.flat.end) padding.push_back({covered, held.flat.end});
  }
  return padding;
}

FlatBuffer::FlatBuffer(const FlatLayout& layout, const FlatBufferSpec& spec,
                       SlabAllocator* allocator)
    : layout_(layout),
      spec_(spec),
      numel_(layout.shard_numel(spec.placed, spec.rank)),
      ranges_(layout.shard_ranges(spec.placed, spec.rank)),
      padding_(padding_ranges(layout, spec.placed, spec.rank)),
      allocator_(allocator) {}

void FlatBuffer::allocate() {
  FSDP_ASSERT(!is_allocated());
  const auto width = static_cast<int64_t>(c10::elementSize(spec_.dtype));
  slab_ = Slab(*allocator_, numel_ * width, layout_.request().align_bytes);
  lie_at(slab_.at(0));
  for (const FlatRange& range : padding_) at(range).zero_();
}

void FlatBuffer::lie_at(void* address) {
  // Views of the same memory stay valid.
  if (!local_.defined() || local_.const_data_ptr() != address)
    local_ = tensor_over(address, numel_, spec_.dtype, spec_.device);
  is_allocated_ = true;
}

void FlatBuffer::release() {
  slab_ = Slab();
  is_allocated_ = false;
}

at::Tensor FlatBuffer::at(FlatRange range) const {
  FSDP_ASSERT(is_allocated(), "local_ may look at memory that is gone");
  if (range.empty()) return local_.narrow(0, 0, 0);
  for (const ShardRange& held : ranges_)
    if (held.flat.begin <= range.begin && range.begin < held.flat.end)
      return local_.narrow(0, held.local_begin + range.begin - held.flat.begin, range.numel());
  throw Error(concat("element ", range.begin, " is not in the rank's part"));
}

void FlatBuffer::set(int64_t index, const at::Tensor& whole) {
  FSDP_ASSERT(is_allocated());
  const at::Tensor flat = whole.reshape({-1});
  for (const TensorSlice& slice : layout_.tensor_slices(spec_.placed, spec_.rank, index))
    local_.narrow(0, slice.local_begin, slice.range.numel())
        .copy_(flat.narrow(0, slice.range.begin, slice.range.numel()));
}

// --- storages of parameters ----------------------------------------------------------------------

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
