#include "fsdp/shard/group_gradient.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "fsdp/base/error.h"
#include "fsdp/base/log.h"
#include "fsdp/base/torch_dtype.h"

namespace fsdp {

GroupGradient::GroupGradient(const FlatLayout& layout, const AxisCuts& cuts,
                             const GroupTypes& types, const GroupSetting& setting)
    : layout_(layout),
      setting_(setting),
      reduction_(cuts, setting.strategy, setting.gradient, setting.mesh, setting.shape),
      wire_(scalar_type_of(types.wire)),
      main_(layout,
            {.placed = setting.strategy.gradient,
             .rank = setting.rank,
             .dtype = scalar_type_of(types.main_grad),
             .device = setting.device},
            setting.memory.main_grad),
      padding_(padding_ranges(layout, {}, setting.rank)),
      written_(static_cast<size_t>(layout.num_tensors()), false) {
  if (reduction_.ends_with_squares())
    squares_ = at::zeros({1}, at::device(setting.device).dtype(at::kDouble));
  if (setting.gradient_lifetime == GradientLifetime::kPersistent) main_.allocate();
}

int64_t GroupGradient::cast_bytes() const {
  if (!reduces_at_cycle_end() || wire_ == main_.dtype()) return 0;
  return layout_.max_shard_numel(main_.spec().placed) *
         static_cast<int64_t>(c10::elementSize(wire_));
}

void GroupGradient::set_wire(at::ScalarType wire) {
  wire_ = wire;
  cast_.reset();
}

void GroupGradient::make_views(const at::Tensor& flat) {
  if (viewed_.is_same(flat)) return;  // the same memory as last time
  viewed_ = flat;
  views_.clear();
  for (int64_t i = 0; i < layout_.num_tensors(); ++i) {
    const FlatRange range = layout_.tensor_range(i);
    views_.push_back(flat.narrow(0, range.begin, range.numel())
                         .view(layout_.request().shapes[static_cast<size_t>(i)]));
  }
  gaps_.clear();
  for (const FlatRange& range : padding_)
    gaps_.push_back(flat.narrow(0, range.begin, range.numel()));
}

void GroupGradient::begin_slab(void* address) {
  FSDP_ASSERT(uses_slab() && !has_slab());
  has_slab_ = true;
  if (!slab_.defined() || slab_.const_data_ptr() != address || slab_.scalar_type() != wire_)
    slab_ = tensor_over(address, layout_.padded_numel(), wire_, setting_.device);
  make_views(slab_);
  std::fill(written_.begin(), written_.end(), false);
  // The slab held something else before, and the padding takes part in the sum.
  if (setting_.device.is_cpu()) {
    for (const at::Tensor& gap : gaps_) std::memset(gap.mutable_data_ptr(), 0, gap.nbytes());
  } else if (!gaps_.empty()) {
    at::_foreach_zero_(gaps_);
  }
}

void GroupGradient::begin_direct() {
  FSDP_ASSERT(!uses_slab());
  if (!main_.is_allocated()) main_.allocate();
  make_views(main_.local());
}

void GroupGradient::accept(int64_t index, const at::Tensor& gradient) {
  const at::Tensor& to = target(index);
  const bool adds = is_written(index);
  if (HeldGradients::takes(to, gradient)) {
    held_.hold(to, gradient, adds ? HeldGradients::How::kAdd : HeldGradients::How::kWrite);
  } else if (adds) {
    place_accepted();
    to.add_(gradient);
  } else {
    to.copy_(gradient);
  }
  mark_written(index);
}

void GroupGradient::fill_missing() {
  for (size_t i = 0; i < views_.size(); ++i) {
    if (!written_[i]) views_[i].zero_();
    written_[i] = true;
  }
}

GradientReduction::Watched GroupGradient::watched(const at::Tensor& nonfinite) {
  cycle_.has_squares = reduction_.ends_with_squares();
  if (!cycle_.has_squares) return {nonfinite, {}};
  squares_.zero_();
  return {nonfinite, squares_};
}

at::Tensor GroupGradient::squares() const {
  const bool are_right = cycle_.has_squares && main_.local()._version() == squares_version_;
  return are_right ? squares_ : at::Tensor();
}

void GroupGradient::start_backward_reduction(const at::Tensor& nonfinite, const Tag& tag) {
  FSDP_ASSERT(has_slab());
  place_accepted();
  fill_missing();
  if (!main_.is_allocated()) main_.allocate();
  // What a cycle's end reduces further has no squares yet.
  const GradientReduction::Watched both =
      reduces_at_cycle_end() ? GradientReduction::Watched{nonfinite, {}} : watched(nonfinite);
  work_ = reduction_.start_each_backward(slab_, main_,
                                         cycle_.is_empty ? Store::kWrite : Store::kAdd, both, tag);
  cycle_.is_empty = false;
}

void GroupGradient::finish_backward_reduction() {
  std::exchange(work_, {}).wait();
  squares_version_ = main_.local()._version();
  has_slab_ = false;
}

void GroupGradient::start_cycle_reduction(const at::Tensor& nonfinite, const Tag& tag) {
  place_accepted();
  if (!uses_slab()) {
    begin_direct();
    fill_missing();
    cycle_.is_empty = false;
  }
  if (!reduces_at_cycle_end()) return;
  cycle_.is_over = true;
  if (cast_bytes() == 0) {
    work_ = reduction_.start_cycle_end(main_, main_, watched(nonfinite), tag, {});
    return;
  }
  if (!cast_) {
    FlatBufferSpec spec = main_.spec();
    spec.dtype = wire_;
    cast_.emplace(layout_, spec, setting_.memory.main_grad);
  }
  WireSlots::Slot& slot = setting_.wire_slots.next();
  cast_->lie_at(slot.memory.at(0));
  work_ = reduction_.start_cycle_end(*cast_, main_, watched(nonfinite), tag, slot.last_use);
  slot.last_use = work_;
}

void GroupGradient::finish_cycle_reduction() {
  std::exchange(work_, {}).wait();
  squares_version_ = main_.local()._version();
}

void GroupGradient::set_cycle(const GradientCycle& cycle) {
  FSDP_ASSERT(!has_slab());
  cycle_ = cycle;
  squares_version_ = main_.is_allocated() ? main_.local()._version() : 0;
  std::fill(written_.begin(), written_.end(), !cycle.is_empty);
}

void GroupGradient::zero() {
  FSDP_ASSERT(!has_slab());
  cycle_ = {};
  std::fill(written_.begin(), written_.end(), false);
}

void GroupGradient::give_back() {
  if (setting_.gradient_lifetime != GradientLifetime::kStep || !main_.is_allocated()) return;
  main_.release();
}

void GroupGradient::abandon() noexcept {
  try {
    std::exchange(work_, {}).wait();
  } catch (const std::exception& error) {
    // What made it be given up is thrown; this follows from it.
    log(LogLevel::kDebug, "a reduction that was given up had failed: ", error.what());
  }
  held_.drop();
  has_slab_ = false;
  zero();
  give_back();
}

}  // namespace fsdp
