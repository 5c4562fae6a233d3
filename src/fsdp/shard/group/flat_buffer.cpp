#include "fsdp/shard/group/flat_buffer.h"

#include <ATen/ATen.h>
#include <c10/core/InferenceMode.h>

#include <algorithm>

#include "fsdp/base/check.h"
#include "fsdp/layout/flat_layout.h"

namespace fsdp {

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

at::Tensor FlatBuffer::part_of(int64_t index) const {
  FSDP_ASSERT(is_allocated());
  const auto slices = layout_.tensor_slices(spec_.placed, spec_.rank, index);
  if (slices.empty()) return local_.narrow(0, 0, 0);
  FSDP_ASSERT(slices.size() == 1, "tensor ", index, " has ", slices.size(), " parts");
  return local_.narrow(0, slices[0].local_begin, slices[0].range.numel());
}

void FlatBuffer::set(int64_t index, const at::Tensor& whole) {
  FSDP_ASSERT(is_allocated());
  const at::Tensor flat = whole.reshape({-1});
  for (const TensorSlice& slice : layout_.tensor_slices(spec_.placed, spec_.rank, index))
    local_.narrow(0, slice.local_begin, slice.range.numel())
        .copy_(flat.narrow(0, slice.range.begin, slice.range.numel()));
}

}  // namespace fsdp
