#include "fsdp/optim/update_state.h"

#include <ATen/ATen.h>

#include "fsdp/base/torch_dtype.h"
#include "fsdp/optim/moment_values.h"

namespace fsdp {

namespace {

constexpr int64_t kAlignBytes = 128;

Moment& moment_of(UpdateSpan& span, size_t which) { return which == 0 ? span.first : span.second; }

std::byte* advanced(void* address, int64_t bytes) {
  return static_cast<std::byte*>(address) + bytes;
}

// Types and places of what does not change from step to step.
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
                         EngineMemory& memory)
    : main_(&main) {
  for (const RuleSpan& run : rules) {
    UpdateSpan& span = spans_.emplace_back(span_of(main, run));
    span.gradient_dtype = gradient_dtype;
    span.group = group;
  }
  SlabAllocator& allocator =
      main.is_offloaded ? memory.on_host(MemoryKind::kMoment) : memory.of(MemoryKind::kMoment);
  const c10::Device device = main.is_offloaded ? c10::Device(c10::kCPU) : main.weight.device();
  moments_.resize(moments.size());
  for (size_t i = 0; i < moments.size(); ++i) allocate(i, moments[i].dtype, allocator, device);
}

void UpdatePiece::allocate(size_t which, DType dtype, SlabAllocator& allocator,
                           c10::Device device) {
  Memory& memory = moments_[which];
  const int64_t value_bytes = main_->flat.numel() * element_bytes(dtype);
  int64_t scale_count = 0;
  for (const UpdateSpan& span : spans_)
    if (is_scaled(dtype)) scale_count += num_scales(flat_range(span));
  constexpr auto kScaleBytes = static_cast<int64_t>(sizeof(float));
  memory.values = Slab(allocator, value_bytes, kAlignBytes);
  memory.scales = Slab(allocator, scale_count * kScaleBytes, kAlignBytes);
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

template <typename Body>
void UpdatePiece::with_moments_on_cpu(size_t which, const Body& body) const {
  const Memory& memory = moments_[which];
  const at::Tensor bytes = memory.bytes.cpu();
  const at::Tensor factors = memory.factors.cpu();
  const auto moved = [](const void* part, const Slab& of, const at::Tensor& to) {
    return advanced(to.mutable_data_ptr(),
                    static_cast<const std::byte*>(part) - static_cast<const std::byte*>(of.at(0)));
  };
  for (const UpdateSpan& span : spans_) {
    Moment moment = which == 0 ? span.first : span.second;
    moment.values = moved(moment.values, memory.values, bytes);
    if (moment.scales != nullptr)
      moment.scales = reinterpret_cast<float*>(moved(moment.scales, memory.scales, factors));
    body(span, moment);
  }
  if (memory.bytes.is_cpu()) return;  // then they are no copies
  memory.bytes.copy_(bytes);
  memory.factors.copy_(factors);
}

at::Tensor UpdatePiece::moment(size_t which) const {
  at::Tensor values = at::empty({main_->flat.numel()}, at::kFloat);
  with_moments_on_cpu(which, [&](const UpdateSpan& span, const Moment& moment) {
    read_moment(moment, which == 0 ? MomentRole::kFirst : MomentRole::kSecond, flat_range(span),
                values.mutable_data_ptr<float>() + span.flat_begin - main_->flat.begin);
  });
  return values;
}

void UpdatePiece::set_moment(size_t which, const at::Tensor& values) {
  const at::Tensor given = values.to(at::kCPU, at::kFloat).contiguous();
  with_moments_on_cpu(which, [&](const UpdateSpan& span, const Moment& moment) {
    write_moment(given.const_data_ptr<float>() + span.flat_begin - main_->flat.begin,
                 which == 0 ? MomentRole::kFirst : MomentRole::kSecond, flat_range(span), moment);
  });
}

GroupUpdate::GroupUpdate(ParamGroup& group, uint64_t number, std::span<const HyperParameters> hyper,
                         const std::vector<MomentKind>& moments, EngineMemory& memory)
    : group_(&group) {
  for (const MainWeightPiece& main : group.main_weights().pieces()) {
    const ShardRange range{.flat = main.flat};
    pieces_.emplace_back(main, group.types().main_grad, number,
                         rule_spans(group.layout(), hyper, {&range, 1}), moments, memory);
  }
}

at::Tensor GroupUpdate::gradient_of(const UpdatePiece& piece) const {
  return group_->gradient().main().at(piece.main().flat);
}

}  // namespace fsdp
