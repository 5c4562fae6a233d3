#include "fsdp/checkpoint/format/tensor_boxes.h"

#include <algorithm>
#include <utility>

#include "fsdp/base/check.h"
#include "fsdp/base/text.h"

namespace fsdp {

std::vector<SectionBox> cut_at_sections(std::span<const TensorSection> sections,
                                        const Box& model_box) {
  std::vector<SectionBox> parts;
  int64_t numel = 0;
  for (size_t s = 0; s < sections.size(); ++s) {
    const TensorSection& section = sections[s];
    Box model = intersect(model_box, {section.offsets, section.shape});
    if (model.numel() == 0) continue;
    Box stored = model;
    for (size_t d = 0; d < stored.offsets.size(); ++d) stored.offsets[d] -= section.offsets[d];
    numel += model.numel();
    parts.push_back({s, std::move(stored), std::move(model)});
  }
  FSDP_ASSERT(numel == model_box.numel(), numel, " of ", model_box.numel(), " elements");
  return parts;
}

int64_t place_of(const SectionBox& part, const OwnedBox& box, std::span<const int64_t> strides) {
  int64_t place = 0;
  for (size_t i = 0; i < strides.size(); ++i)
    place += (box.owned.offsets[i] + part.model.offsets[i] - box.whole.offsets[i]) * strides[i];
  return place;
}

std::vector<int64_t> strides_of(std::span<const int64_t> shape) {
  std::vector<int64_t> strides(shape.size(), 1);
  // An empty tensor needs no strides, and products of its other sizes may overflow.
  if (std::find(shape.begin(), shape.end(), 0) != shape.end()) return strides;
  for (size_t i = shape.size(); i-- > 1;) strides[i - 1] = strides[i] * shape[i];
  return strides;
}

StridedBox packed(const Box& box, int64_t begin) { return {box, strides_of(box.sizes), begin}; }

StridedBox flattened(std::span<const int64_t> shape, int64_t first) {
  return {{std::vector<int64_t>(shape.size(), 0), {shape.begin(), shape.end()}},
          strides_of(shape),
          -first};
}

Box intersect(const Box& a, const Box& b) {
  FSDP_ASSERT(a.sizes.size() == b.sizes.size(), a.sizes.size(), " and ", b.sizes.size(), " dims");
  Box both = a;
  for (size_t i = 0; i < a.sizes.size(); ++i) {
    const int64_t end = std::min(a.offsets[i] + a.sizes[i], b.offsets[i] + b.sizes[i]);
    both.offsets[i] = std::max(a.offsets[i], b.offsets[i]);
    both.sizes[i] = std::max<int64_t>(0, end - both.offsets[i]);
  }
  return both;
}

StridedBox part_of(const StridedBox& whole, const Box& box) {
  StridedBox part{intersect(whole.box, box), whole.strides, whole.begin};
  for (size_t i = 0; i < whole.strides.size(); ++i)
    part.begin += (part.box.offsets[i] - whole.box.offsets[i]) * whole.strides[i];
  return part;
}

std::vector<Run> runs(const StridedBox& from, const StridedBox& to) {
  const StridedBox source = part_of(from, to.box);
  const StridedBox target = part_of(to, from.box);
  if (source.box.numel() == 0) return {};
  const std::vector<int64_t>& sizes = source.box.sizes;

  // Joins the last dims that are contiguous in both memories into one run.
  int64_t run_numel = 1;
  size_t outer_dims = sizes.size();
  while (outer_dims > 0 &&
         (sizes[outer_dims - 1] == 1 || (source.strides[outer_dims - 1] == run_numel &&
                                         target.strides[outer_dims - 1] == run_numel)))
    run_numel *= sizes[--outer_dims];

  std::vector<Run> all;
  std::vector<int64_t> index(outer_dims, 0);
  for (;;) {
    Run run{source.begin, target.begin, run_numel};
    for (size_t i = 0; i < outer_dims; ++i) {
      run.from += index[i] * source.strides[i];
      run.to += index[i] * target.strides[i];
    }
    all.push_back(run);
    size_t dim = outer_dims;
    while (dim > 0 && ++index[dim - 1] == sizes[dim - 1]) index[--dim] = 0;
    if (dim == 0) return all;
  }
}

}  // namespace fsdp
