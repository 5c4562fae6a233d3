#include "fsdp/checkpoint/patches/changed_weights.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <map>
#include <utility>

#include "fsdp/base/check.h"
#include "fsdp/base/torch_dtype.h"
#include "fsdp/checkpoint/format/tensor_boxes.h"
#include "fsdp/checkpoint/rank_agreement.h"
#include "fsdp/optim/optimizer_impl.h"
#include "fsdp/shard/engine/engine.h"

namespace fsdp {

namespace {

// The published tensors that a member of a group is divided into, and where this rank's part of the
// member lies in them.
struct PlacedMember {
  struct PlacedRun {
    size_t section = 0;
    Run run;  // from the group's whole buffer to the flattened section
  };
  std::vector<TensorSection> sections;
  std::vector<PlacedRun> runs;  // ascending in the group's buffer; together all that the rank holds
};

PlacedMember placed_member(const ParamGroup& group, int64_t index, const NameRules& rules) {
  PlacedMember member{rules.sections(group.name_of(index), group.whole_shape_of(index)), {}};
  const std::vector<int64_t>& shape = group.shape_of(index);
  const std::vector<int64_t> strides = strides_of(shape);
  const int64_t begin = group.layout().tensor_range(index).begin;
  for (const OwnedBox& box : owned_boxes(group.owned_of(index), shape, group.held_of(index)))
    for (const SectionBox& part : cut_at_sections(member.sections, box.whole)) {
      const TensorSection& section = member.sections[part.section];
      const StridedBox from{part.model, strides, begin + place_of(part, box, strides)};
      const StridedBox to{{section.offsets, section.shape}, strides_of(section.shape), 0};
      for (const Run& run : runs(from, to)) member.runs.push_back({part.section, run});
    }
  std::sort(member.runs.begin(), member.runs.end(),
            [](const auto& a, const auto& b) { return a.run.from < b.run.from; });
  return member;
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

// Adds weights [flat) of the group, which are all that the rank holds of the member.
void add_everything(const PlacedMember& member, const ParamGroup& group, FlatRange flat,
                    std::vector<ChangedTensor>& sections) {
  const at::Tensor values = weights_at(group, flat);
  for (const auto& [section, run] : member.runs)
    sections[section].add_range(run.to, values.narrow(0, run.from - flat.begin, run.numel));
}

// Adds elements of the group's buffer at their places in the sections. Tensors that are cut along
// their rows have a run for each row, so elements find their runs by themselves.
void add_placed(const PlacedMember& member, const at::Tensor& positions, const at::Tensor& values,
                std::vector<ChangedTensor>& sections) {
  const std::vector<PlacedMember::PlacedRun>& runs = member.runs;
  const auto shift_of = [](const Run& run) { return run.to - run.from; };
  if (runs.size() == 1) {
    const auto& [section, run] = runs.front();
    return sections[section].add_elements(run.to, positions.add(shift_of(run)), values);
  }
  const auto each_run = [&](const auto& number) {
    const at::Tensor numbers = at::empty({static_cast<int64_t>(runs.size())}, at::kLong);
    std::transform(runs.begin(), runs.end(), numbers.mutable_data_ptr<int64_t>(), number);
    return numbers.to(positions.device());
  };
  const at::Tensor begins = each_run([](const auto& each) { return each.run.from; });
  const at::Tensor shifts = each_run([&](const auto& each) { return shift_of(each.run); });
  const at::Tensor run_of =
      at::searchsorted(begins, positions, /*out_int32=*/false, /*right=*/true).sub_(1);
  const at::Tensor placed = shifts.index_select(0, run_of).add_(positions);
  const at::Tensor section_of = each_run([](const auto& each) {
                                  return static_cast<int64_t>(each.section);
                                }).index_select(0, run_of);
  for (size_t section = 0; section < sections.size(); ++section) {
    const at::Tensor own = section_of.eq(static_cast<int64_t>(section)).nonzero().view({-1});
    const auto first = std::find_if(runs.begin(), runs.end(),
                                    [&](const auto& each) { return each.section == section; });
    if (own.numel() > 0)
      sections[section].add_elements(first->run.to, placed.index_select(0, own),
                                     values.index_select(0, own));
  }
}

// Adds the marked ones of weights [flat).
void add_marked(const PlacedMember& member, const GroupUpdate& update, FlatRange flat,
                std::vector<ChangedTensor>& sections) {
  for (const UpdatePiece& piece : update.pieces()) {
    const MainWeightPiece& main = piece.main();
    const at::Tensor positions = piece.marked(flat).to(main.weight.device());
    if (positions.numel() == 0) continue;
    const at::Tensor values = main.weight.index_select(0, positions.sub(main.flat.begin));
    add_placed(member, positions, values, sections);
  }
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

void ChangedTensor::add_elements(int64_t begin, at::Tensor positions, at::Tensor values) {
  if (values.numel() > 0) parts_.push_back({begin, std::move(positions), std::move(values)});
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
  // Weights on the host, or of a group that was set as a whole, may meet others on a device.
  const auto where = [](const Part& part) { return part.values.device(); };
  const bool is_one_device = std::all_of(parts_.begin(), parts_.end(), [&](const Part& part) {
    return where(part) == where(parts_.front());
  });
  PatchTensor tensor{std::move(name), std::move(shape), {}, {}, {}};
  const bool has_ranges = std::none_of(parts_.begin(), parts_.end(),
                                       [](const Part& part) { return part.positions.defined(); });
  std::vector<at::Tensor> values;
  std::vector<at::Tensor> positions;
  for (Part& part : parts_) {
    if (!is_one_device) part.values = part.values.cpu();
    if (!is_one_device && part.positions.defined()) part.positions = part.positions.cpu();
    values.push_back(part.values);
    const int64_t end = part.begin + part.values.numel();
    if (!has_ranges) {
      positions.push_back(
          part.positions.defined()
              ? part.positions
              : at::arange(part.begin, end, part.values.options().dtype(at::kLong)));
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

void ChangedWeights::take(Which which, const Give& give) {
  Engine& engine = EngineAccess::of(state_.sharded);
  engine.wait();
  std::map<const ParamGroup*, GroupUpdate*> updates;
  for (GroupUpdate* update : OptimizerAccess::of(*state_.optimizer).group_updates())
    updates[&update->group()] = update;
  int64_t number = 0;
  bool is_any_rewritten = false;
  for (const auto& unit : engine.units())
    for (ParamGroup& group : unit->groups()) {
      const bool is_rewritten = group.main_weights().take_is_rewritten();
      is_any_rewritten |= is_rewritten;
      const auto it = updates.find(&group);
      GroupUpdate* update = it == updates.end() ? nullptr : it->second;  // nullptr: frozen
      for (int64_t i = 0; i < group.layout().num_tensors(); ++i) {
        const PlacedMember member = placed_member(group, i, rules_);
        std::vector<ChangedTensor> sections(member.sections.size());
        const int64_t begin = group.layout().tensor_range(i).begin;
        const FlatRange held = group.held_of(i);
        const FlatRange flat{begin + held.begin, begin + held.end};
        if (brings(group, number++) && !held.empty()) {
          if (is_rewritten || which == Which::kEverything)
            add_everything(member, group, flat, sections);
          else if (update != nullptr)
            add_marked(member, *update, flat, sections);
        }
        for (size_t k = 0; k < sections.size(); ++k)
          give(member.sections[k].name, std::move(sections[k]));
      }
      if (update == nullptr) continue;
      for (UpdatePiece& piece : update->pieces()) piece.clear_marks();
    }
  if (is_any_rewritten) engine.take_over_main_weights();
  give_buffers(give);
}

// Every rank has all of a buffer, and nobody knows what has changed in it.
void ChangedWeights::give_buffers(const Give& give) const {
  const bool is_first = rank_in(EngineAccess::of(state_.sharded).mesh()) == 0;
  for (const NamedBuffer& buffer : state_.buffers) {
    const at::Tensor whole = buffer.value.detach().to(at::kCPU, buffer.value.scalar_type(), false,
                                                      /*copy=*/true);
    for (const TensorSection& section : rules_.sections(buffer.name, whole.sizes())) {
      at::Tensor part = whole;
      for (size_t dim = 0; dim < section.shape.size(); ++dim)
        part = part.narrow(static_cast<int64_t>(dim), section.offsets[dim], section.shape[dim]);
      ChangedTensor elements;
      if (is_first) elements.add_range(0, part.reshape({-1}));
      give(section.name, std::move(elements));
    }
  }
}

}  // namespace fsdp
