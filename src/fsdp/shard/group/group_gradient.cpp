#include "fsdp/shard/group/group_gradient.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "fsdp/base/check.h"
#include "fsdp/base/device_stream.h"
#include "fsdp/base/log.h"
#include "fsdp/base/torch_dtype.h"
#include "fsdp/layout/lanes.h"
#include "fsdp/shard/group/pack_on_device.h"

namespace fsdp {

namespace {

FlatBufferSpec gradient_spec(PlacementPair placed, at::ScalarType dtype,
                             const GroupSetting& setting) {
  return {.placed = placed, .rank = setting.rank, .dtype = dtype, .device = setting.device};
}

// The most that a group holds back, so that a large gradient's memory does not wait.
constexpr int64_t kMaxHeldBytes = int64_t{16} << 20;

bool is_packed(const at::Tensor& tensor) {
  return at::isFloatingType(tensor.scalar_type()) &&
         is_packed_on_device(dtype_of(tensor.scalar_type())) && tensor.is_contiguous();
}

// Whether the kernel that packs takes both.
bool is_packed(const at::Tensor& target, const at::Tensor& gradient) {
  return has_device_packs() && target.is_cuda() && gradient.device() == target.device() &&
         gradient.layout() == at::kStrided && gradient.numel() == target.numel() &&
         is_packed(target) && is_packed(gradient) && !gradient.is_conj() && !gradient.is_neg();
}

}  // namespace

GroupGradient::GroupGradient(const FlatLayout& layout, const GroupPaths& paths,
                             const GroupTypes& types, const GroupSetting& setting)
    : layout_(layout),
      setting_(setting),
      each_backward_(layout, setting.grid, setting.rank, paths.each_backward),
      cycle_end_(layout, setting.grid, setting.rank, paths.cycle_end),
      local_scale_(paths.local_scale),
      main_(layout,
            gradient_spec(setting.strategy.gradient, scalar_type_of(types.main_grad), setting),
            &setting.memory.main_grad),
      padding_(padding_ranges(layout, {}, setting.rank)),
      written_(static_cast<size_t>(layout.num_tensors()), false),
      came_(written_.size(), false),
      missing_(written_.size(), false) {
  set_wire(scalar_type_of(types.wire));
  if (setting.has_lanes() && c10::elementSize(main_.dtype()) < c10::elementSize(at::kFloat))
    throw UsageError(concat("lanes add up in main gradients of fp32, but these are ",
                            c10::toString(main_.dtype()), "; set precision.main_grads to fp32"));
  for (int64_t i = 1; i < MicroStepParts::count(setting.micro_steps); ++i)
    parts_.emplace_back(layout, main_.spec(), &setting.memory.main_grad);
  const Redistribution& last = reduces_at_cycle_end() ? cycle_end_ : each_backward_;
  // Their order is that of the cut, so lanes do without.
  if (last.ends_in_shard() && !setting.has_lanes())
    squares_ = at::zeros({1}, at::device(setting.device).dtype(at::kDouble));
  if (setting.gradient_lifetime == GradientLifetime::kPersistent) allocate();
}

void GroupGradient::allocate() {
  if (main_.is_allocated()) return;
  main_.allocate();
  for (FlatBuffer& part : parts_) part.allocate();
}

GroupGradient::CastRoom GroupGradient::cast_room() const {
  // Sums of lanes travel as wide as they are.
  const bool casts = reduces_at_cycle_end() && wire_ != main_.dtype() && !setting_.has_lanes();
  const int64_t numel = casts ? layout_.max_shard_numel(main_.spec().placed) : 0;
  return {numel * static_cast<int64_t>(c10::elementSize(wire_)), cycle_end_.num_stages()};
}

void GroupGradient::set_wire(at::ScalarType wire) {
  if (setting_.has_lanes() && each_backward_.num_stages() > 1 && wire != main_.dtype())
    throw UsageError(concat("lanes are rounded to ", c10::toString(wire),
                            " on their way, and gradients that every backward reduces along two "
                            "axes would be rounded again in between; set precision.grad_comm to "
                            "fp32, or choose another strategy"));
  wire_ = wire;
  slab_.emplace(layout_, gradient_spec({}, wire, setting_));
  cast_.emplace(layout_, gradient_spec(main_.spec().placed, wire, setting_));
}

void GroupGradient::move(GradientPhase from, GradientPhase to) {
  FSDP_ASSERT(phase_ == from, "phase ", static_cast<int>(phase_), " of a gradient, not ",
              static_cast<int>(from));
  phase_ = to;
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

void GroupGradient::begin_writing(void* slab) {
  move(GradientPhase::kResting, GradientPhase::kWriting);
  if (!uses_slab()) {
    allocate();
    return make_views(main_.local());
  }
  slab_->lie_at(slab);
  make_views(slab_->local());
  std::fill(written_.begin(), written_.end(), false);
  // The slab held other data before, and the padding takes part in the sum.
  if (setting_.device.is_cpu()) {
    for (const at::Tensor& gap : gaps_) std::memset(gap.mutable_data_ptr(), 0, gap.nbytes());
  } else if (!gaps_.empty()) {
    at::_foreach_zero_(gaps_);
  }
}

void GroupGradient::accept(int64_t index, const at::Tensor& gradient) {
  const at::Tensor& to = target(index);
  const bool adds = written_[static_cast<size_t>(index)];
  if (local_scale_ != 1.0 && !uses_slab()) {
    adds ? to.add_(gradient, local_scale_) : to.copy_(gradient).mul_(local_scale_);
  } else if (is_packed(to, gradient)) {
    hold(to, gradient, adds);
  } else if (adds) {
    place_accepted();
    to.add_(gradient);
  } else {
    to.copy_(gradient);
  }
  mark_written(index);
}

bool GroupGradient::takes_direct(at::ScalarType written) const {
  return uses_slab() ? written == wire_ : local_scale_ == 1.0 && written == main_.dtype();
}

GroupGradient::Direct GroupGradient::direct(int64_t index) {
  const bool adds = written_[static_cast<size_t>(index)];
  if (adds) place_accepted();
  mark_written(index);
  return {target(index), adds};
}

at::Tensor GroupGradient::written(int64_t index) {
  if (phase_ != GradientPhase::kWriting || !written_[static_cast<size_t>(index)]) return {};
  place_accepted();
  return target(index);
}

void GroupGradient::mark_written(int64_t index) {
  written_[static_cast<size_t>(index)] = true;
  came_[static_cast<size_t>(index)] = true;
}

void GroupGradient::hold(const at::Tensor& target, const at::Tensor& gradient, bool adds) {
  const c10::Stream current = current_stream(target.device());
  // One launch belongs to one stream and touches a target once.
  const bool is_held = std::any_of(held_.begin(), held_.end(),
                                   [&](const Held& held) { return held.target.is_same(target); });
  if (is_held || held_on_ != current) place_accepted();
  held_on_ = current;
  held_.push_back({target, gradient, adds});
  held_bytes_ += static_cast<int64_t>(gradient.nbytes());
  if (held_bytes_ > kMaxHeldBytes) place_accepted();
}

// On the current stream, on which all readers of the targets come later.
void GroupGradient::place_accepted() {
  if (held_.empty()) return;
  const c10::Stream current = current_stream(held_on_->device());
  if (current != *held_on_) {
    follow(current, *held_on_);
    for (const Held& held : held_) used_on(current, held.gradient);
  }
  std::vector<PackedTensor> tensors;
  tensors.reserve(held_.size());
  for (const Held& held : held_)
    tensors.push_back({.from = held.gradient.const_data_ptr(),
                       .from_dtype = dtype_of(held.gradient.scalar_type()),
                       .to = held.target.mutable_data_ptr(),
                       .numel = held.target.numel(),
                       .adds = held.adds});
  const DType type = dtype_of(held_.front().target.scalar_type());
  pack_on_device(tensors, type, current.native_handle());
  held_.clear();
  held_bytes_ = 0;
}

void GroupGradient::fill_missing() {
  for (size_t i = 0; i < views_.size(); ++i) {
    if (!written_[i]) views_[i].zero_();
    written_[i] = true;
  }
}

// How the reduction that completes the gradients stores them.
Reduction GroupGradient::watched(const at::Tensor& nonfinite) {
  cycle_.has_squares = squares_.defined();
  if (cycle_.has_squares) squares_.zero_();
  return {.nonfinite = nonfinite, .squares = squares_};
}

at::Tensor GroupGradient::squares() const {
  const bool are_right = cycle_.has_squares && main_.local()._version() == squares_version_;
  return are_right ? squares_ : at::Tensor();
}

void GroupGradient::end_writing(const at::Tensor& nonfinite, const Tag& tag) {
  move(GradientPhase::kWriting, uses_slab() ? GradientPhase::kReducing : GradientPhase::kReduced);
  place_accepted();
  if (!uses_slab()) return;
  fill_missing();
  allocate();
  // Gradients that the cycle's end reduces further have no squares yet.
  Reduction last = reduces_at_cycle_end() ? Reduction{.nonfinite = nonfinite} : watched(nonfinite);
  const int64_t micro_step = cycle_.num_backwards++;
  const bool has_lanes = setting_.has_lanes();
  FSDP_ASSERT(!has_lanes || micro_step < setting_.micro_steps);
  const bool adds = has_lanes ? MicroStepParts::is_added(micro_step) : micro_step > 0;
  last.store = adds ? Store::kAdd : Store::kWrite;
  const FlatBuffer& to = has_lanes ? part(MicroStepParts::part_of(micro_step)) : main_;
  if (each_backward_.communicates())
    work_ = each_backward_.start(*slab_, to, tag, {}, last);
  else
    add_slab(to, last.store);
}

// Stores as a reduction would, without other ranks.
void GroupGradient::add_slab(const FlatBuffer& to, Store store) {
  if (store == Store::kAdd)
    to.local().add_(slab_->local(), local_scale_);
  else
    to.local().copy_(slab_->local()).mul_(local_scale_);
}

void GroupGradient::wait() {
  const bool ends_backward = phase_ == GradientPhase::kReducing;
  if (ends_backward) phase_ = GradientPhase::kReduced;
  std::exchange(work_, {}).wait();
  if (ends_backward && setting_.has_lanes())
    MicroStepParts::complete(cycle_.num_backwards - 1, [this](int64_t to, int64_t from) {
      part(to).local().add_(part(from).local());
    });
  squares_version_ = main_.local()._version();
}

void GroupGradient::reopen() {
  if (phase_ != GradientPhase::kResting) move(GradientPhase::kReduced, GradientPhase::kResting);
}

void GroupGradient::start_cycle_reduction(const at::Tensor& nonfinite, const Tag& tag) {
  if (!uses_slab()) {
    fill_missing();
    cycle_.num_backwards = 1;
  }
  if (!reduces_at_cycle_end()) return;
  cycle_.is_over = true;
  const Reduction last = watched(nonfinite);
  if (cast_room().bytes == 0) {
    work_ = cycle_end_.start(main_, main_, tag, {}, last);
    return;
  }
  WireSlots::Slot& slot = setting_.wire_slots.next();
  cast_->lie_at(slot.memory.at(0));
  work_ = cycle_end_.start_in_type_of(*cast_, main_, tag, slot.last_use, last);
  slot.last_use = work_;
}

void GroupGradient::set_cycle(const GradientCycle& cycle) {
  FSDP_ASSERT(phase_ != GradientPhase::kWriting && phase_ != GradientPhase::kReducing);
  cycle_ = cycle;
  squares_version_ = main_.is_allocated() ? main_.local()._version() : 0;
  for (std::vector<bool>* flags : {&written_, &came_})
    std::fill(flags->begin(), flags->end(), !cycle.is_empty());
  std::fill(missing_.begin(), missing_.end(), false);
}

void GroupGradient::zero() {
  FSDP_ASSERT(phase_ != GradientPhase::kWriting && phase_ != GradientPhase::kReducing);
  cycle_ = {};
  for (std::vector<bool>* flags : {&written_, &came_, &missing_})
    std::fill(flags->begin(), flags->end(), false);
}

void GroupGradient::release() {
  if (setting_.gradient_lifetime != GradientLifetime::kStep || !main_.is_allocated()) return;
  main_.release();
  for (FlatBuffer& part : parts_) part.release();
}

void GroupGradient::cancel() noexcept {
  try {
    std::exchange(work_, {}).wait();
  } catch (const std::exception& error) {
    // Only logged: the caller reports the first error, which caused this one.
    log(LogLevel::kDebug, "a cancelled reduction had failed: ", error.what());
  }
  held_.clear();
  held_bytes_ = 0;
  phase_ = GradientPhase::kResting;
  zero();
  release();
}

}  // namespace fsdp
