#include "fsdp/shard/gradient_reduction.h"

#include <ATen/ATen.h>

namespace fsdp {

GradientReduction::GradientReduction(const AxisCuts& cuts, const Strategy& strategy,
                                     GradientOf gradient, const Mesh& mesh)
    : cuts_(cuts),
      mesh_(mesh),
      // Once inner is cut a rank has its inner part to reduce, which is the outer axis' whole.
      replicated_axis_(strategy.optimizer.inner == Placement::kShard ? Axis::kOuter
                                                                     : Axis::kInner) {
  const MeshShape shape{.outer = mesh.outer().size(), .inner = mesh.inner().size()};
  for (const ReductionStage& stage : reduction_path(strategy, shape, gradient))
    (stage.when == ReduceWhen::kEachBackward ? each_backward_ : cycle_end_).push_back(stage);
}

// `source_at` gives the memory where a stage reads and works in place, `result_at` where the last
// one writes.
Work GradientReduction::run(const Stages& stages, Reduction last_reduction, const Tag& tag,
                            const auto& source_at, const auto& result_at) const {
  Work after;
  for (const ReductionStage& stage : stages) {
    const bool is_last = &stage == &stages.back();
    Reduction reduction = is_last ? last_reduction : Reduction{};
    reduction.scale = stage.scale;
    const MeshAxis& axis = stage.axis == Axis::kInner ? mesh_.inner() : mesh_.outer();
    Work last;
    if (stage.to == Placement::kShard) {
      for (const AxisCut& cut : cuts_.along(stage.axis))
        last =
            axis.reduce().reduce_scatter(is_last ? result_at(cut.part) : source_at(cut.part),
                                         source_at(cut.whole), reduction, tag, cut.counts, after);
    } else {
      for (const AxisCut& cut : cuts_.along(replicated_axis_))
        last = axis.reduce().all_reduce(source_at(cut.whole), reduction, tag, after);
    }
    after = last;
  }
  return after;
}

Work GradientReduction::start_each_backward(const at::Tensor& slab, const FlatBuffer& main_grad,
                                            Store store, const at::Tensor& nonfinite,
                                            const Tag& tag) const {
  Reduction last;
  last.store = store;
  last.nonfinite = nonfinite;
  return run(
      each_backward_, last, tag,
      [&](FlatRange range) { return slab.narrow(0, range.begin, range.numel()); },
      [&](FlatRange range) { return main_grad.at(range); });
}

Work GradientReduction::start_cycle_end(const FlatBuffer& wire, const FlatBuffer& main_grad,
                                        const at::Tensor& nonfinite, const Tag& tag) const {
  Reduction last;
  last.nonfinite = nonfinite;
  return run(
      cycle_end_, last, tag, [&](FlatRange range) { return wire.at(range); },
      [&](FlatRange range) { return main_grad.at(range); });
}

}  // namespace fsdp
