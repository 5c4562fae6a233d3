#include "fsdp/optim/update_state.h"

#include <ATen/ATen.h>

#include <algorithm>

#include "fsdp/base/check.h"
#include "fsdp/base/integer.h"
#include "fsdp/base/torch_dtype.h"
#include "fsdp/optim/kernels/moments.h"
#include "fsdp/optim/kernels/update_span.h"

namespace fsdp {

namespace {

Moment& moment_of(UpdateSpan& span, size_t which) { return which == 0 ? span.first : span.second; }

std::byte* advanced(void* address, int64_t bytes) {
  return static_cast<std::byte*>(address) + bytes;
}

// The types and addresses that do not change from step to step.
UpdateSpan span_of(const MainWeightPiece& main, const RuleSpan& run) {
  const int64_t begin = run.flat.begin - main.flat.begin;
  const auto address = [&](const at::Tensor& tensor) {
    return advanced(tensor.mutable_data_ptr(), begin * static_cast<int64_t>(tensor.element_size()));
  };
  UpdateSpan span{.weight_dtype = dtype_of(main.weight.scalar_type()),
                  .numel = run.flat.numel(),
                  .flat_begin = run.flat.begin,
                  .rate_scale = static_cast<float>(run.hyper.rate_scale),
                  .weight_decay = static_cast<float>(run.hyper.weight_decay)};
  if (!main.main.defined()) {
    span.weight = address(main.weight);
  } else if (main.is_offloaded && main.main.scalar_type() == main.weight.scalar_type()) {
    span.weight = address(main.main);  // updated on the host, then copied to the device
  } else {
    span.main = main.is_split ? MainWeight::kSplit : MainWeight::kSeparate;
    span.main_weight = address(main.main);
    if (!main.is_offloaded) span.weight = address(main.weight);
  }
  return span;
}

}  // namespace

UpdatePiece::UpdatePiece(const MainWeightPiece& main, DType gradient_dtype, uint64_t group,
                         const std::vector<RuleSpan>& rules, const std::vector<MomentKind>& moments,
                         ChangeMarks marks, EngineMemory& memory)
    : main_(&main) {
  for (const RuleSpan& run : rules) {
    UpdateSpan& span = spans_.emplace_back(span_of(main, run));
    span.gradient_dtype = gradient_dtype;
    span.group = group;
    rules_.push_back(run.hyper.rule);
  }
  SlabAllocator& allocator =
      main.is_offloaded ? memory.on_host(MemoryKind::kMoment) : memory.of(MemoryKind::kMoment);
  const c10::Device device = main.is_offloaded ? c10::Device(c10::kCPU) : main.weight.device();
  moments_.resize(moments.size());
  for (size_t i = 0; i < moments.size(); ++i) allocate(i, moments[i].dtype, allocator, device);
  if (marks == ChangeMarks::kKept) allocate_marks(allocator, device);
}

void UpdatePiece::set_rule(int32_t rule, double weight_decay, double rate_scale) {
  for (size_t i = 0; i < spans_.size(); ++i) {
    if (rules_[i] != rule) continue;
    spans_[i].weight_decay = static_cast<float>(weight_decay);
    spans_[i].rate_scale = static_cast<float>(rate_scale);
  }
}

void UpdatePiece::allocate(size_t which, DType dtype, SlabAllocator& allocator,
                           c10::Device device) {
  Memory& memory = moments_[which];
  const int64_t value_bytes = main_->flat.numel() * element_bytes(dtype);
  int64_t scale_count = 0;
  for (const UpdateSpan& span : spans_)
    if (is_scaled(dtype)) scale_count += num_scales(flat_range(span));
  constexpr auto kScaleBytes = static_cast<int64_t>(sizeof(float));
  memory.values = Slab(allocator, value_bytes, kStateAlignBytes);
  memory.scales = Slab(allocator, scale_count * kScaleBytes, kStateAlignBytes);
  memory.bytes = tensor_over(memory.values.at(0), value_bytes, at::kByte, device).zero_();
  memory.factors = tensor_over(memory.scales.at(0), scale_count, at::kFloat, device).zero_();

  int64_t next_scale = 0;
  for (UpdateSpan& span : spans_) {
    Moment& moment = moment_of(span, which);
    moment.dtype = dtype;
    moment.values = memory.values.at((span.flat_begin - main_->flat.begin) * element_bytes(dtype));
    if (!is_scaled(dtype)) continue;
    moment.scales = static_cast<float*>(memory.scales.at(next_scale * kScaleBytes));
    next_scale += num_scales(flat_range(span));
  }
}

void UpdatePiece::allocate_marks(SlabAllocator& allocator, c10::Device device) {
  const int64_t numel = num_mark_lanes(main_->flat);
  constexpr auto kLaneBytes = static_cast<int64_t>(sizeof(uint16_t));
  mark_memory_ = Slab(allocator, numel * kLaneBytes, kStateAlignBytes);
  marks_ =
      tensor_over(mark_memory_.at(0), numel, at::kShort, device).view({-1, kMarkLanes}).zero_();
  for (UpdateSpan& span : spans_)
    span.marks = static_cast<uint16_t*>(
        mark_memory_.at(first_mark_lane(main_->flat.begin, span.flat_begin) * kLaneBytes));
}

at::Tensor UpdatePiece::marked(FlatRange flat) const {
  flat = intersect(flat, main_->flat);
  if (flat.empty()) return at::empty({0}, marks_.options().dtype(at::kLong));
  if (marks_.is_cpu()) {
    std::vector<int64_t> positions;
    find_marked(static_cast<const uint16_t*>(mark_memory_.at(0)), main_->flat.begin, flat,
                positions);
    return at::tensor(positions, at::kLong);
  }
  // Bits become bytes, so a part of the marks at a time.
  constexpr int64_t kMostBlocks = (int64_t{1} << 24) / kScaleBlock;
  const at::Tensor bits =
      at::arange(kScaleBlock / kMarkLanes, marks_.options().dtype(at::kShort)).view({-1, 1});
  std::vector<at::Tensor> parts;
  const int64_t first = main_->flat.begin / kScaleBlock;
  for (int64_t block = flat.begin / kScaleBlock; block * kScaleBlock < flat.end;) {
    const int64_t count = std::min(kMostBlocks, (flat.end - 1) / kScaleBlock + 1 - block);
    const FlatRange range = intersect(flat, {block * kScaleBlock, (block + count) * kScaleBlock});
    const at::Tensor marks = marks_.narrow(0, block - first, count).unsqueeze(1);
    const at::Tensor found = marks.bitwise_right_shift(bits)
                                 .bitwise_and_(1)
                                 .view({-1})
                                 .narrow(0, range.begin - block * kScaleBlock, range.numel())
                                 .nonzero();
    parts.push_back(found.view({-1}).add_(range.begin));
    block += count;
  }
  return parts.size() == 1 ? parts.front() : at::cat(parts);
}

// Part of one span's moment: in place if it is in host memory, else a copy.
class UpdatePiece::MomentOnCpu {
 public:
  // Widens `flat` to whole blocks of scales, as far as the span has them.
  MomentOnCpu(const Memory& memory, const UpdateSpan& span, size_t which, FlatRange flat)
      : memory_(memory), role_(which == 0 ? MomentRole::kFirst : MomentRole::kSecond), flat_(flat) {
    moment_ = which == 0 ? span.first : span.second;
    const int64_t width = element_bytes(moment_.dtype);
    if (moment_.scales != nullptr) {
      const FlatRange all = flat_range(span);
      flat_ = {std::max(flat.begin / kScaleBlock * kScaleBlock, all.begin),
               std::min(round_up(flat.end, kScaleBlock), all.end)};
      const int64_t first = flat_.begin / kScaleBlock - all.begin / kScaleBlock;
      scales_begin_ = moment_.scales - static_cast<float*>(memory.scales.at(0)) + first;
      scales_ = memory.factors.narrow(0, scales_begin_, num_scales(flat_)).cpu();
      moment_.scales = scales_.mutable_data_ptr<float>();
    }
    bytes_begin_ = static_cast<const std::byte*>(moment_.values) -
                   static_cast<const std::byte*>(memory.values.at(0)) +
                   (flat_.begin - span.flat_begin) * width;
    bytes_ = memory.bytes.narrow(0, bytes_begin_, flat_.numel() * width).cpu();
    moment_.values = bytes_.mutable_data_ptr();
  }

  FlatRange flat() const { return flat_; }
  void read(float* values) const { fsdp::read_moment(moment_, role_, flat_, values); }
  void write(const float* values) const {
    write_moment(values, role_, flat_, moment_);
    if (memory_.bytes.is_cpu()) return;  // not copies
    memory_.bytes.narrow(0, bytes_begin_, bytes_.numel()).copy_(bytes_);
    if (scales_.defined()) memory_.factors.narrow(0, scales_begin_, scales_.numel()).copy_(scales_);
  }

 private:
  const Memory& memory_;
  const MomentRole role_;
  FlatRange flat_;
  Moment moment_;
  at::Tensor bytes_;
  at::Tensor scales_;
  int64_t bytes_begin_ = 0;
  int64_t scales_begin_ = 0;
};

template <typename Body>
void UpdatePiece::for_each_part(size_t which, FlatRange flat, const Body& body) const {
  for (const UpdateSpan& span : spans_)
    if (const FlatRange common = intersect(flat_range(span), flat); !common.empty())
      body(MomentOnCpu(moments_[which], span, which, common), common);
}

void UpdatePiece::read_moment(size_t which, FlatRange flat, float* values) const {
  std::vector<float> wider;
  for_each_part(which, flat, [&](const MomentOnCpu& moment, FlatRange common) {
    float* const into = values + (common.begin - flat.begin);
    if (moment.flat() == common) return moment.read(into);
    wider.resize(static_cast<size_t>(moment.flat().numel()));
    moment.read(wider.data());
    std::copy_n(wider.data() + (common.begin - moment.flat().begin), common.numel(), into);
  });
}

void UpdatePiece::set_moment(size_t which, FlatRange flat, const float* values) {
  std::vector<float> wider;
  for_each_part(which, flat, [&](const MomentOnCpu& moment, FlatRange common) {
    const float* const from = values + (common.begin - flat.begin);
    if (moment.flat() == common) return moment.write(from);
    wider.resize(static_cast<size_t>(moment.flat().numel()));
    moment.read(wider.data());
    std::copy_n(from, common.numel(), wider.data() + (common.begin - moment.flat().begin));
    moment.write(wider.data());
  });
}

const float* UpdatePiece::moment_in_host_memory(size_t which, FlatRange flat) const {
  const Memory& memory = moments_[which];
  const bool is_plain = !spans_.empty() && memory.bytes.is_cpu() &&
                        (which == 0 ? spans_[0].first : spans_[0].second).dtype == DType::kFloat32;
  if (!is_plain) return nullptr;
  return static_cast<const float*>(memory.values.at(0)) + (flat.begin - main_->flat.begin);
}

GroupUpdate::GroupUpdate(ParamGroup& group, uint64_t number, std::span<const HyperParameters> hyper,
                         std::vector<MomentKind> moments, Spans spans, ChangeMarks marks,
                         EngineMemory& memory)
    : group_(&group), moments_(std::move(moments)) {
  for (const MainWeightPiece& main : group.main_weights().pieces()) {
    const ShardRange range{.flat = main.flat};
    pieces_.emplace_back(main, group.types().main_grad, number,
                         spans == Spans::kLong ? rule_spans(group.layout(), hyper, {&range, 1})
                                               : matrix_spans(group.layout(), hyper, {&range, 1}),
                         moments_, marks, memory);
  }
}

void GroupUpdate::read_moment(size_t which, FlatRange flat, float* values) const {
  for (const UpdatePiece& piece : pieces_)
    if (const FlatRange common = intersect(piece.main().flat, flat); !common.empty())
      piece.read_moment(which, common, values + (common.begin - flat.begin));
}

void GroupUpdate::set_moment(size_t which, FlatRange flat, const float* values) {
  for (UpdatePiece& piece : pieces_)
    if (const FlatRange common = intersect(piece.main().flat, flat); !common.empty())
      piece.set_moment(which, common, values + (common.begin - flat.begin));
}

const float* GroupUpdate::moment_in_host_memory(size_t which, FlatRange flat) const {
  for (const UpdatePiece& piece : pieces_)
    if (intersect(piece.main().flat, flat) == flat) return piece.moment_in_host_memory(which, flat);
  return nullptr;
}

bool GroupUpdate::is_left_out(int64_t member) const {
  return std::any_of(exceptions_.begin(), exceptions_.end(), [&](const Exception& each) {
    return each.member == member && each.is_left_out;
  });
}

GroupUpdate::Exception& GroupUpdate::exception_of(int64_t member) {
  const auto find = [&] {
    return std::find_if(exceptions_.begin(), exceptions_.end(),
                        [&](const Exception& each) { return each.member == member; });
  };
  if (find() == exceptions_.end()) {
    exceptions_.push_back({.member = member, .flat = group_->layout().tensor_range(member)});
    std::sort(exceptions_.begin(), exceptions_.end(),
              [](const Exception& a, const Exception& b) { return a.flat.begin < b.flat.begin; });
  }
  return *find();
}

bool GroupUpdate::misses_others() const {
  for (int64_t i = 0; i < group_->layout().num_tensors(); ++i)
    if (group_->gradient().is_missing(i) != is_left_out(i)) return true;
  return false;
}

void GroupUpdate::leave_out_missing(int64_t step) {
  for (int64_t i = 0; i < group_->layout().num_tensors(); ++i) {
    const bool is_missing = group_->gradient().is_missing(i);
    if (is_missing == is_left_out(i)) continue;
    if (is_missing) check_scales_end_with(i);
    const int64_t updates = updates_of(i, step);
    exception_of(i).updates = updates;
    exception_of(i).num_missed = step - updates;
    exception_of(i).is_left_out = is_missing;
  }
}

int64_t GroupUpdate::updates_of(int64_t member, int64_t step) const {
  for (const Exception& each : exceptions_)
    if (each.member == member) return each.is_left_out ? each.updates : step - each.num_missed;
  return step;
}

void GroupUpdate::set_updates_of(int64_t member, int64_t updates, int64_t step) {
  if (updates == updates_of(member, step)) return;
  exception_of(member) = {.member = member,
                          .flat = group_->layout().tensor_range(member),
                          .num_missed = step - updates};
}

// Looks at the whole layout, not at this rank's part of it: all ranks must come to the same end.
void GroupUpdate::check_scales_end_with(int64_t member) const {
  const bool has_scales =
      std::any_of(moments_.begin(), moments_.end(),
                  [](const MomentKind& moment) { return is_scaled(moment.dtype); });
  const FlatRange out = group_->layout().tensor_range(member);
  for (const int64_t cut : {out.begin, out.end})
    if (has_scales && cut % kScaleBlock != 0 && cut != group_->layout().padded_numel())
      throw UsageError(
          concat("parameter '", group_->name_of(member),
                 "' got no gradient, but its moments share a scale with a neighbour's, so it "
                 "cannot be left out of the update; freeze it before fully_shard(), keep moments "
                 "in fp32 or bf16, or set step.without_gradient to kUpdate, which takes its "
                 "gradient for 0"));
}

bool GroupUpdate::is_left_out(const UpdateSpan& span) const {
  return std::any_of(exceptions_.begin(), exceptions_.end(), [&](const Exception& each) {
    return each.is_left_out && intersect(each.flat, flat_range(span)) == flat_range(span);
  });
}

at::Tensor GroupUpdate::gradient_of(const UpdatePiece& piece) const {
  return group_->gradient().main().at(piece.main().flat);
}

}  // namespace fsdp
