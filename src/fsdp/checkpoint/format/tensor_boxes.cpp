#include "fsdp/checkpoint/format/tensor_boxes.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "fsdp/base/check.h"
#include "fsdp/base/text.h"

namespace fsdp {

namespace {

// The common part of a section and a box of its model tensor; nullopt if it is empty.
std::optional<SectionBox> shared_part(const TensorSection& section, size_t index, const Box& box) {
  SectionBox part{.section = index, .stored = {}, .model = {}};
  for (size_t d = 0; d < box.sizes.size(); ++d) {
    const int64_t begin = std::max(box.offsets[d], section.offsets[d]);
    const int64_t end =
        std::min(box.offsets[d] + box.sizes[d], section.offsets[d] + section.shape[d]);
    if (begin >= end) return std::nullopt;
    part.model.offsets.push_back(begin);
    part.model.sizes.push_back(end - begin);
    part.stored.offsets.push_back(begin - section.offsets[d]);
    part.stored.sizes.push_back(end - begin);
  }
  return part;
}

}  // namespace

std::vector<SectionBox> cut_at_sections(std::span<const TensorSection> sections,
                                        const Box& model_box) {
  FSDP_ASSERT(model_box.offsets.size() == model_box.sizes.size());
  std::vector<SectionBox> parts;
  int64_t numel = 0;
  for (size_t s = 0; s < sections.size(); ++s) {
    const TensorSection& section = sections[s];
    FSDP_CHECK(section.shape.size() == model_box.sizes.size(), "a box of ", model_box.sizes.size(),
               " dims cannot be cut at section '", section.name, "' of shape ",
               list_text(section.shape), "; give a box of the tensor the section belongs to");
    FSDP_ASSERT(section.offsets.size() == section.shape.size());
    std::optional<SectionBox> part = shared_part(section, s, model_box);
    if (!part) continue;
    numel += part->model.numel();
    parts.push_back(*std::move(part));
  }
  FSDP_CHECK(numel == model_box.numel(), "the box at ", list_text(model_box.offsets),
             " with sizes ", list_text(model_box.sizes), " shares ", numel,
             " elements with the sections of its tensor instead of ", model_box.numel(),
             "; give a box inside the tensor");
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
