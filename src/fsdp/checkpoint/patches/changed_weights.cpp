#include "fsdp/checkpoint/patches/changed_weights.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <utility>

#include "fsdp/base/check.h"
#include "fsdp/base/torch_dtype.h"
#include "fsdp/checkpoint/format/tensor_boxes.h"
#include "fsdp/checkpoint/rank_agreement.h"
#include "fsdp/checkpoint/state_pieces.h"
#include "fsdp/optim/optimizer_impl.h"
#include "fsdp/shard/engine/engine_views.h"

namespace fsdp {

namespace {

// Ranks that have the same weights bring tensors in turn, so that all have some.
bool brings(const ParamGroup& group, int64_t number) {
  const Replicas replicas = replicas_with(group);
  return number % replicas.count == replicas.index;
}

// Neighbouring elements of a group's whole buffer that lie in the same order in one published
// tensor: in one run, or in several with gaps between them where the tensor is cut along its rows.
struct Stretch {
  size_t section = 0;  // of the group
  FlatRange from;
  std::vector<Run> runs;

  // All between the first of its elements in the published tensor and the last.
  FlatRange to() const { return {runs.front().to, runs.back().to + runs.back().numel}; }
};

// Where this rank's part of a group lies in published tensors.
struct PlacedGroup {
  std::vector<std::string> sections;  // names of the published tensors
  std::vector<Stretch> stretches;     // of what this rank brings, ascending in the group's buffer
};

PlacedGroup placed_group(const ParamGroup& group, const NameRules& rules, int64_t first_number) {
  PlacedGroup placed;
  std::vector<std::pair<size_t, Run>> all;
  for (int64_t i = 0; i < group.layout().num_tensors(); ++i) {
    const std::vector<TensorSection> sections =
        rules.sections(group.name_of(i), group.whole_shape_of(i));
    const size_t first_section = placed.sections.size();
    for (const TensorSection& section : sections) placed.sections.push_back(section.name);
    if (!brings(group, first_number + i)) continue;
    const std::vector<int64_t>& shape = group.shape_of(i);
    const std::vector<int64_t> strides = strides_of(shape);
    const int64_t begin = group.layout().tensor_range(i).begin;
    for (const OwnedBox& box : owned_boxes(group.owned_of(i), shape, group.held_of(i)))
      for (const SectionBox& part : cut_at_sections(sections, box.whole)) {
        const TensorSection& section = sections[part.section];
        const StridedBox from{part.model, strides, begin + place_of(part, box, strides)};
        const StridedBox to{{section.offsets, section.shape}, strides_of(section.shape), 0};
        for (const Run& run : runs(from, to)) all.emplace_back(first_section + part.section, run);
      }
  }
  std::sort(all.begin(), all.end(),
            [](const auto& a, const auto& b) { return a.second.from < b.second.from; });
  for (const auto& [section, run] : all) {
    const bool goes_on = !placed.stretches.empty() && placed.stretches.back().section == section &&
                         placed.stretches.back().from.end == run.from &&
                         placed.stretches.back().to().end <= run.to;
    if (!goes_on) placed.stretches.push_back({section, {run.from, run.from}, {}});
    placed.stretches.back().from.end += run.numel;
    placed.stretches.back().runs.push_back(run);
  }
  return placed;
}

// Weights [flat) of a group's whole buffer, as they compute, on the CPU.
at::Tensor weights_at(const ParamGroup& group, FlatRange flat) {
  const at::Tensor values = at::empty({flat.numel()}, scalar_type_of(group.types().weight));
  read_computing_weights(group, flat, values);
  return values;
}

void add_everything(const PlacedGroup& placed, const ParamGroup& group,
                    std::vector<ChangedTensor>& sections) {
  for (const Stretch& stretch : placed.stretches) {
    const at::Tensor values = weights_at(group, stretch.from);
    for (const Run& run : stretch.runs)
      sections[stretch.section].add_range(
          run.to, values.narrow(0, run.from - stretch.from.begin, run.numel));
  }
}

// Marked elements of one piece. All of them find their places at once, because a device takes as
// long for a few elements as for many.
void add_marked(const PlacedGroup& placed, const UpdatePiece& piece,
                std::vector<ChangedTensor>& sections) {
  if (placed.stretches.empty()) return;  // other ranks bring all of the group
  const MainWeightPiece& main = piece.main();
  const at::Tensor positions = piece.marked(main.flat).to(main.weight.device());
  if (positions.numel() == 0) return;
  const at::Tensor values = main.weight.index_select(0, positions.sub(main.flat.begin));
  std::vector<int64_t> run_begins;
  std::vector<int64_t> shifts;
  std::vector<int64_t> ends;  // of stretches
  for (const Stretch& stretch : placed.stretches) {
    for (const Run& run : stretch.runs) {
      run_begins.push_back(run.from);
      shifts.push_back(run.to - run.from);
    }
    ends.push_back(stretch.from.begin);
    ends.push_back(stretch.from.end);
  }
  const auto there = [&](const std::vector<int64_t>& numbers) {
    return at::tensor(numbers, at::kLong).to(positions.device());
  };
  // Elements that another rank brings lie in no run: whatever place they get, nobody takes them.
  const at::Tensor run_of =
      at::bucketize(positions, there(run_begins), false, /*right=*/true).sub_(1).clamp_min_(0);
  const at::Tensor places = there(shifts).index_select(0, run_of).add_(positions);
  const at::Tensor cuts = at::searchsorted(positions, there(ends)).cpu();
  const auto* cut = cuts.const_data_ptr<int64_t>();
  for (const Stretch& stretch : placed.stretches) {
    const int64_t first = *cut++;
    const int64_t count = *cut++ - first;
    sections[stretch.section].add_elements(stretch.to(), places.narrow(0, first, count),
                                           values.narrow(0, first, count));
  }
}

}  // namespace

// --- one tensor ----------------------------------------------------------------------------------

void ChangedTensor::add_range(int64_t to, at::Tensor values) {
  const FlatRange range{to, to + values.numel()};
  if (!range.empty()) parts_.push_back({range, at::Tensor(), std::move(values)});
}

void ChangedTensor::add_elements(FlatRange among, at::Tensor positions, at::Tensor values) {
  if (values.numel() > 0) parts_.push_back({among, std::move(positions), std::move(values)});
}

void ChangedTensor::shift(int64_t offset) {
  for (Part& part : parts_) {
    part.range = {part.range.begin + offset, part.range.end + offset};
    if (part.positions.defined() && offset != 0) part.positions = part.positions.add(offset);
  }
}

void ChangedTensor::append(ChangedTensor other) {
  std::move(other.parts_.begin(), other.parts_.end(), std::back_inserter(parts_));
}

PatchTensor ChangedTensor::as_patch(std::string name, std::vector<int64_t> shape) && {
  std::vector<Part> parts = std::move(parts_);
  std::sort(parts.begin(), parts.end(),
            [](const Part& a, const Part& b) { return a.range.begin < b.range.begin; });
  // Weights on the host, or of a group that was set as a whole, may meet others on a device.
  const auto is_elsewhere = [&](const Part& part) {
    return part.values.device() != parts.front().values.device();
  };
  if (std::any_of(parts.begin(), parts.end(), is_elsewhere))
    for (Part& part : parts) {
      part.values = part.values.cpu();
      if (part.positions.defined()) part.positions = part.positions.cpu();
    }
  PatchTensor tensor{std::move(name), std::move(shape), {}, {}, {}};
  const bool has_ranges = std::none_of(parts.begin(), parts.end(),
                                       [](const Part& part) { return part.positions.defined(); });
  std::vector<at::Tensor> values;
  std::vector<at::Tensor> positions;
  bool is_ascending = true;
  int64_t end = 0;
  for (const auto& [range, own, part_values] : parts) {
    is_ascending &= end <= range.begin;
    values.push_back(part_values);
    if (!has_ranges)
      positions.push_back(own.defined() ? own
                                        : at::arange(range.begin, range.end,
                                                     part_values.options().dtype(at::kLong)));
    else if (!tensor.ranges.empty() && end == range.begin)
      tensor.ranges.back().end = range.end;
    else
      tensor.ranges.push_back({range.begin, range.end});
    end = range.end;
  }
  tensor.values = values.size() == 1 ? values.front() : at::cat(values);
  if (has_ranges) return tensor;
  tensor.positions = positions.size() == 1 ? positions.front() : at::cat(positions);
  if (is_ascending) return tensor;
  // Slices of a tensor that was cut along another dim than the first lie between each other.
  const auto [sorted, order] = tensor.positions.sort();
  tensor.positions = sorted;
  tensor.values = tensor.values.index_select(0, order);
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
  check_names(state_, rules_);
  const StateView view(state_.sharded);
  for (const auto& unit : view.units())
    for (const ParamGroup& group : unit->groups())
      for (int64_t i = 0; i < group.layout().num_tensors(); ++i)
        add(group.name_of(i), group.whole_shape_of(i), group.types().weight);
  for (const NamedBuffer& buffer : state_.buffers)
    add(buffer.name, buffer.value.sizes().vec(), dtype_of(buffer.value.scalar_type()));
}

void ChangedWeights::take(Which which, const Give& give) {
  const StateView engine(state_.sharded);
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
      const PlacedGroup placed = placed_group(group, rules_, number);
      number += group.layout().num_tensors();
      std::vector<ChangedTensor> sections(placed.sections.size());
      if (is_rewritten || which == Which::kEverything) add_everything(placed, group, sections);
      if (update != nullptr)
        for (UpdatePiece& piece : update->pieces()) {
          if (!is_rewritten && which == Which::kChanged) add_marked(placed, piece, sections);
          piece.clear_marks();
        }
      for (size_t i = 0; i < sections.size(); ++i) give(placed.sections[i], std::move(sections[i]));
    }
  if (is_any_rewritten) engine.take_over_main_weights();
  give_buffers(give);
}

// Every rank has all of a buffer, and nobody knows what has changed in it.
void ChangedWeights::give_buffers(const Give& give) const {
  const bool is_first = rank_in(StateView(state_.sharded).mesh()) == 0;
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

// --- positions in a file -------------------------------------------------------------------------

namespace {

// How many numbers more than elements skips take.
at::Tensor num_more(const at::Tensor& skips, int64_t largest) {
  return skips.div(largest, "trunc").sum();
}

// Numbers of `dtype`, unsigned whatever it says, of which `largest` is the largest.
at::Tensor numbers_of(const at::Tensor& skips, int64_t more, int64_t largest,
                      at::ScalarType dtype) {
  if (more == 0) return skips.to(dtype);
  const at::Tensor places = skips.div(largest, "trunc").add_(1).cumsum(0).sub_(1);
  return at::zeros({skips.numel() + more}, skips.options().dtype(dtype))
      .bitwise_not_()  // the largest number everywhere
      .index_copy_(0, places, skips.remainder(largest).to(dtype));
}

// `skips` of neighbours are 0.
at::Tensor as_ranges(const at::Tensor& positions, const at::Tensor& skips) {
  const at::Tensor is_first = skips.ne(0);
  is_first[0].fill_(true);
  const at::Tensor first = is_first.nonzero().view({-1});
  const at::Tensor last =
      at::cat({first.slice(0, 1), at::full({1}, positions.numel(), first.options())}).sub_(1);
  return at::stack({positions.index_select(0, first), positions.index_select(0, last).add_(1)}, 1);
}

}  // namespace

EncodedPositions encoded(const at::Tensor& positions) {
  const at::Tensor before = at::full({1}, -1, positions.options());
  const at::Tensor skips = positions.diff(1, 0, before).sub_(1);
  const at::Tensor sizes =
      at::stack({num_more(skips, largest_skip<uint8_t>()),
                 num_more(skips, largest_skip<uint16_t>()), skips.slice(0, 1).ne(0).sum().add_(1)})
          .cpu();
  const auto* size = sizes.const_data_ptr<int64_t>();
  const int64_t narrow_bytes = positions.numel() + size[0];
  const int64_t wide_bytes = 2 * (positions.numel() + size[1]);
  const int64_t range_bytes = static_cast<int64_t>(sizeof(FlatRange)) * size[2];
  if (range_bytes <= std::min(narrow_bytes, wide_bytes))
    return {PositionForm::kRanges, as_ranges(positions, skips).cpu()};
  if (narrow_bytes <= wide_bytes)
    return {PositionForm::kSkips,
            numbers_of(skips, size[0], largest_skip<uint8_t>(), at::kByte).cpu()};
  return {PositionForm::kWideSkips,
          numbers_of(skips, size[1], largest_skip<uint16_t>(), at::kShort).cpu()};
}

EncodedPositions encoded(std::span<const FlatRange> ranges) {
  const at::Tensor numbers = at::empty({static_cast<int64_t>(ranges.size()), 2}, at::kLong);
  static_assert(sizeof(FlatRange) == 2 * sizeof(int64_t));
  std::memcpy(numbers.mutable_data_ptr(), ranges.data(), ranges.size_bytes());
  return {PositionForm::kRanges, numbers};
}

}  // namespace fsdp
