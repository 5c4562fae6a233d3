#include "fsdp/shard/gradient_reduction.h"

#include <ATen/ATen.h>

namespace fsdp {

GradientReduction::GradientReduction(const AxisCuts& cuts, const Strategy& strategy,
                                     GradientOf gradient, const Mesh& mesh, MeshShape shape)
    : cuts_(cuts),
      mesh_(mesh),
      // Once inner is cut a rank has its inner part to reduce, which is the outer axis' whole.
      replicated_axis_(strategy.optimizer.inner == Placement::kShard ? Axis::kOuter
                                                                     : Axis::kInner) {
  for (const ReductionStage& stage : reduction_path(strategy, shape, gradient))
    (stage.when == ReduceWhen::kEachBackward ? each_backward_ : cycle_end_).stages.push_back(stage);
}

// `source_at` gives the memory where a stage reads and works in place, `result_at` where the last
// one writes.
void GradientReduction::build(Path& path, const auto& source_at, const auto& result_at) const {
  path.steps.clear();
  path.back.clear();
  for (const ReductionStage& stage : path.stages) {
    std::vector<Step>& steps = path.steps.emplace_back();
    const bool scatters = stage.to == Placement::kShard;
    const bool is_last = &stage == &path.stages.back();
    for (const AxisCut& cut : cuts_.along(scatters ? stage.axis : replicated_axis_)) {
      const at::Tensor whole = source_at(cut.whole);
      if (!scatters) {
        steps.push_back({whole, whole, {}});
        if (is_last) path.back.push_back({result_at(cut.whole), whole, {}});
      } else {
        steps.push_back({is_last ? result_at(cut.part) : source_at(cut.part), whole, cut.counts});
      }
    }
  }
}

Communicator& GradientReduction::communicator_of(const ReductionStage& stage) const {
  return (stage.axis == Axis::kInner ? mesh_.inner() : mesh_.outer()).reduce();
}

Work GradientReduction::run(const Path& path, Reduction last_reduction, const Tag& tag) const {
  Work after;
  for (size_t i = 0; i < path.stages.size(); ++i) {
    const ReductionStage& stage = path.stages[i];
    Reduction reduction = i + 1 == path.stages.size() ? last_reduction : Reduction{};
    reduction.scale = stage.scale;
    Communicator& communicator = communicator_of(stage);
    Work last;
    for (const Step& step : path.steps[i])
      last = stage.to == Placement::kShard
                 ? communicator.reduce_scatter(step.output, step.input, reduction, tag, step.counts,
                                               after)
                 : communicator.all_reduce(step.output, reduction, tag, after);
    after = last;
  }
  return after;
}

Work GradientReduction::start_each_backward(const at::Tensor& slab, const FlatBuffer& main_grad,
                                            Store store, const Watched& watched, const Tag& tag) {
  Path& path = each_backward_;
  if (!path.is_for(slab, main_grad.local())) {
    build(
        path, [&](FlatRange range) { return slab.narrow(0, range.begin, range.numel()); },
        [&](FlatRange range) { return main_grad.at(range); });
    path.source = slab;
    path.result = main_grad.local();
  }
  Reduction last;
  last.store = store;
  last.nonfinite = watched.nonfinite;
  last.squares = watched.squares;
  return run(path, last, tag);
}

Work GradientReduction::start_cycle_end(const FlatBuffer& wire, const FlatBuffer& main_grad,
                                        const Watched& watched, const Tag& tag, const Work& after) {
  Path& path = cycle_end_;
  if (!path.is_for(wire.local(), main_grad.local())) {
    build(
        path, [&](FlatRange range) { return wire.at(range); },
        [&](FlatRange range) { return main_grad.at(range); });
    path.source = wire.local();
    path.result = main_grad.local();
  }
  Reduction last;
  last.nonfinite = watched.nonfinite;
  last.squares = watched.squares;
  if (&wire == &main_grad) return run(path, last, tag);
  communicator_of(path.stages.front()).copy(wire.local(), main_grad.local(), tag, after);
  Work end = run(path, last, tag);
  for (const Step& step : path.back)
    end = communicator_of(path.stages.back()).copy(step.output, step.input, tag);
  return end;
}

}  // namespace fsdp
