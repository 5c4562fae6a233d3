#include "fsdp/checkpoint/patches/changed_weights.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <utility>

#include "fsdp/base/check.h"
#include "fsdp/base/torch_dtype.h"
#include "fsdp/checkpoint/format/tensor_boxes.h"
#include "fsdp/checkpoint/rank_agreement.h"
#include "fsdp/optim/optimizer_impl.h"
#include "fsdp/shard/engine/engine.h"

namespace fsdp {

namespace {

// A part of a group's whole buffer, and where it lies in a published tensor.
struct PlacedRun {
  std::string name;
  Run run;  // from the group's whole buffer to the flattened tensor
};

std::vector<PlacedRun> placed_runs(const ParamGroup& group, int64_t index, const NameRules& rules) {
  const std::vector<TensorSection> sections =
      rules.sections(group.name_of(index), group.whole_shape_of(index));
  const std::vector<int64_t>& shape = group.shape_of(index);
  const std::vector<int64_t> strides = strides_of(shape);
  const int64_t begin = group.layout().tensor_range(index).begin;
  std::vector<PlacedRun> placed;
  for (const OwnedBox& box : owned_boxes(group.owned_of(index), shape, group.held_of(index)))
    for (const SectionBox& part : cut_at_sections(sections, box.whole)) {
      const TensorSection& section = sections[part.section];
      const StridedBox from{part.model, strides, begin + place_of(part, box, strides)};
      const StridedBox to{{section.offsets, section.shape}, strides_of(section.shape), 0};
      for (const Run& run : runs(from, to)) placed.push_back({section.name, run});
    }
  return placed;
}

// Weights [flat) of a group's whole buffer, as they compute, on the CPU.
at::Tensor weights_at(const ParamGroup& group, FlatRange flat) {
  std::vector<at::Tensor> parts;
  for (const MainWeightPiece& piece : group.main_weights().pieces())
    if (const FlatRange common = intersect(piece.flat, flat); !common.empty())
      parts.push_back(piece.weight.narrow(0, common.begin - piece.flat.begin, common.numel())
                          .to(at::kCPU, piece.weight.scalar_type(), false, /*copy=*/true));
  return parts.size() == 1 ? parts.front() : at::cat(parts);
}

// The same of single elements; `positions` are ascending.
at::Tensor weights_at(const ParamGroup& group, const at::Tensor& positions) {
  const auto* first = positions.const_data_ptr<int64_t>();
  const auto* last = first + positions.numel();
  std::vector<at::Tensor> parts;
  for (const MainWeightPiece& piece : group.main_weights().pieces()) {
    const auto* begin = std::lower_bound(first, last, piece.flat.begin);
    const auto* end = std::lower_bound(begin, last, piece.flat.end);
    if (begin == end) continue;
    const at::Tensor own = positions.narrow(0, begin - first, end - begin)
                               .sub(piece.flat.begin)
                               .to(piece.weight.device());
    parts.push_back(piece.weight.index_select(0, own).cpu());
  }
  return parts.size() == 1 ? parts.front() : at::cat(parts);
}

// Of ranks that have the same weights, one brings a tensor: in turn, so that all have some.
bool brings(const ParamGroup& group, int64_t number) {
  const GroupSetting& setting = group.setting();
  const PlacementPair placed = setting.strategy.optimizer;
  int64_t count = 1;
  int64_t index = 0;
  if (placed.inner == Placement::kReplicate) {
    count = setting.shape.inner;
    index = setting.rank.inner;
  }
  if (placed.outer == Placement::kReplicate) {
    index = index * setting.shape.outer + setting.rank.outer;
    count *= setting.shape.outer;
  }
  return number % count == index;
}

}  // namespace

// --- one tensor ----------------------------------------------------------------------------------

void ChangedTensor::add_range(int64_t to, at::Tensor values) {
  if (values.numel() > 0) parts_.push_back({to, at::Tensor(), std::move(values)});
}

void ChangedTensor::add_elements(at::Tensor positions, at::Tensor values) {
  if (values.numel() == 0) return;
  const int64_t begin = positions.const_data_ptr<int64_t>()[0];
  parts_.push_back({begin, std::move(positions), std::move(values)});
}

void ChangedTensor::shift(int64_t offset) {
  for (Part& part : parts_) {
    part.begin += offset;
    if (part.positions.defined() && offset != 0) part.positions = part.positions.add(offset);
  }
}

void ChangedTensor::append(ChangedTensor other) {
  std::move(other.parts_.begin(), other.parts_.end(), std::back_inserter(parts_));
}

PatchTensor ChangedTensor::as_patch(std::string name, std::vector<int64_t> shape) && {
  std::sort(parts_.begin(), parts_.end(),
            [](const Part& a, const Part& b) { return a.begin < b.begin; });
  PatchTensor tensor{std::move(name), std::move(shape), {}, {}, {}};
  const bool has_ranges = std::none_of(parts_.begin(), parts_.end(),
                                       [](const Part& part) { return part.positions.defined(); });
  std::vector<at::Tensor> values;
  std::vector<at::Tensor> positions;
  for (const Part& part : parts_) {
    values.push_back(part.values);
    const int64_t end = part.begin + part.values.numel();
    if (!has_ranges) {
      positions.push_back(part.positions.defined() ? part.positions
                                                   : at::arange(part.begin, end, at::kLong));
    } else if (!tensor.ranges.empty() && tensor.ranges.back().end == part.begin) {
      tensor.ranges.back().end = end;
    } else {
      tensor.ranges.push_back({part.begin, end});
    }
  }
  tensor.values = values.size() == 1 ? values.front() : at::cat(values);
  if (has_ranges) return tensor;
  tensor.positions = positions.size() == 1 ? positions.front() : at::cat(positions);
  // Slices of a tensor that was cut along another dim than the first lie between each other.
  if (tensor.positions.numel() > 1 && tensor.positions.diff().le(0).any().item<bool>()) {
    const auto [sorted, order] = tensor.positions.sort();
    tensor.positions = sorted;
    tensor.values = tensor.values.index_select(0, order);
  }
  return tensor;
}

// --- a model -------------------------------------------------------------------------------------

ChangedWeights::ChangedWeights(const CheckpointState& state, const NameRules& rules)
    : state_(state), rules_(rules) {
  if (state.optimizer == nullptr || !OptimizerAccess::of(*state.optimizer).marks_changes())
    throw UsageError(
        "patches need an optimizer that marks the weights it changes; give one in the state, made "
        "with step.marks_changes = true");
  const auto add = [&](const std::string& name, const std::vector<int64_t>& shape, DType dtype) {
    for (const TensorSection& section : rules_.sections(name, shape))
      tensors_.push_back({section.name, dtype, section.shape});
  };
  std::vector<NamedShape> names;
  for (const auto& unit : EngineAccess::of(state_.sharded).units())
    for (const ParamGroup& group : unit->groups())
      for (int64_t i = 0; i < group.layout().num_tensors(); ++i) {
        names.push_back({group.name_of(i), group.whole_shape_of(i)});
        add(group.name_of(i), group.whole_shape_of(i), group.types().weight);
      }
  for (const NamedBuffer& buffer : state_.buffers) {
    names.push_back({buffer.name, buffer.value.sizes().vec()});
    add(buffer.name, buffer.value.sizes().vec(), dtype_of(buffer.value.scalar_type()));
  }
  check_unique(rules_, names);
}

std::map<std::string, ChangedTensor> ChangedWeights::take(Which which) {
  Engine& engine = EngineAccess::of(state_.sharded);
  engine.wait();
  std::map<const ParamGroup*, GroupUpdate*> updates;
  for (GroupUpdate* update : OptimizerAccess::of(*state_.optimizer).group_updates())
    updates[&update->group()] = update;
  std::map<std::string, ChangedTensor> changed;
  int64_t number = 0;
  bool is_any_rewritten = false;
  for (const auto& unit : engine.units())
    for (ParamGroup& group : unit->groups()) {
      const bool is_rewritten = group.main_weights().take_is_rewritten();
      is_any_rewritten |= is_rewritten;
      const auto it = updates.find(&group);
      take_group(group, it == updates.end() ? nullptr : it->second,
                 is_rewritten || which == Which::kEverything, number, changed);
    }
  if (is_any_rewritten) engine.take_over_main_weights();
  // Every rank has all of a buffer, and nobody knows what has changed in it.
  for (const NamedBuffer& buffer : state_.buffers) {
    if (rank_in(engine.mesh()) != 0) break;
    const at::Tensor whole = buffer.value.detach().to(at::kCPU, buffer.value.scalar_type(), false,
                                                      /*copy=*/true);
    for (const TensorSection& section : rules_.sections(buffer.name, whole.sizes())) {
      at::Tensor part = whole;
      for (size_t dim = 0; dim < section.shape.size(); ++dim)
        part = part.narrow(static_cast<int64_t>(dim), section.offsets[dim], section.shape[dim]);
      changed[section.name].add_range(0, part.reshape({-1}));
    }
  }
  return changed;
}

void ChangedWeights::take_group(ParamGroup& group, GroupUpdate* update, bool is_everything,
                                int64_t& number, std::map<std::string, ChangedTensor>& changed) {
  for (int64_t i = 0; i < group.layout().num_tensors(); ++i)
    if (brings(group, number++)) add_member(group, update, i, is_everything, changed);
  if (update == nullptr) return;  // frozen
  for (UpdatePiece& piece : update->pieces()) piece.clear_marks();
}

void ChangedWeights::add_member(const ParamGroup& group, const GroupUpdate* update, int64_t index,
                                bool is_everything,
                                std::map<std::string, ChangedTensor>& changed) const {
  const FlatRange held = group.held_of(index);
  if (held.empty()) return;
  const std::vector<PlacedRun> placed = placed_runs(group, index, rules_);
  if (is_everything) {
    for (const PlacedRun& each : placed)
      changed[each.name].add_range(
          each.run.to, weights_at(group, {each.run.from, each.run.from + each.run.numel}));
    return;
  }
  if (update == nullptr) return;
  const int64_t begin = group.layout().tensor_range(index).begin;
  std::vector<at::Tensor> parts;
  for (const UpdatePiece& piece : update->pieces())
    parts.push_back(piece.marked({begin + held.begin, begin + held.end}));
  const at::Tensor positions = at::cat(parts);
  if (positions.numel() == 0) return;
  const at::Tensor values = weights_at(group, positions);
  const auto* first = positions.const_data_ptr<int64_t>();
  const auto* last = first + positions.numel();
  for (const PlacedRun& each : placed) {
    const auto* from = std::lower_bound(first, last, each.run.from);
    const auto* to = std::lower_bound(from, last, each.run.from + each.run.numel);
    changed[each.name].add_elements(
        positions.narrow(0, from - first, to - from).add(each.run.to - each.run.from),
        values.narrow(0, from - first, to - from));
  }
}

}  // namespace fsdp
