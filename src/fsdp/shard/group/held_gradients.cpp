#include "fsdp/shard/group/held_gradients.h"

#include <ATen/ATen.h>

#include <algorithm>

#include "fsdp/base/device_stream.h"
#include "fsdp/base/error.h"
#include "fsdp/base/torch_dtype.h"
#include "fsdp/shard/group/pack_on_device.h"

namespace fsdp {

namespace {

bool is_packed(const at::Tensor& tensor) {
  return at::isFloatingType(tensor.scalar_type()) &&
         is_packed_on_device(dtype_of(tensor.scalar_type())) && tensor.is_contiguous();
}

}  // namespace

bool HeldGradients::takes(const at::Tensor& target, const at::Tensor& gradient) {
  return has_device_packs() && target.is_cuda() && gradient.device() == target.device() &&
         gradient.layout() == at::kStrided && gradient.numel() == target.numel() &&
         is_packed(target) && is_packed(gradient) && !gradient.is_conj() && !gradient.is_neg();
}

void HeldGradients::hold(const at::Tensor& target, const at::Tensor& gradient, How how) {
  const c10::Stream current = current_stream(target.device());
  // One launch belongs to one stream and touches a target once.
  const bool is_held = std::any_of(held_.begin(), held_.end(),
                                   [&](const Held& held) { return held.target.is_same(target); });
  if (is_held || stream_ != current) pack();
  stream_ = current;
  held_.push_back({target, gradient, how});
  num_bytes_ += static_cast<int64_t>(gradient.nbytes());
  if (num_bytes_ > kMaxBytes) pack();
}

void HeldGradients::pack() {
  if (held_.empty()) return;
  const c10::Stream current = current_stream(stream_->device());
  if (current != *stream_) {
    follow(current, *stream_);
    for (const Held& held : held_) used_on(current, held.gradient);
  }
  std::vector<PackedTensor> tensors;
  tensors.reserve(held_.size());
  for (const Held& held : held_)
    tensors.push_back({.from = held.gradient.const_data_ptr(),
                       .from_dtype = dtype_of(held.gradient.scalar_type()),
                       .to = held.target.mutable_data_ptr(),
                       .numel = held.target.numel(),
                       .adds = held.how == How::kAdd});
  const DType type = dtype_of(held_.front().target.scalar_type());
  pack_on_device(tensors, type, /*scale=*/1.0f, current.native_handle());
  reset();
}

void HeldGradients::reset() noexcept {
  held_.clear();
  num_bytes_ = 0;
}

}  // namespace fsdp
