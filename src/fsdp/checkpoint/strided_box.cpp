#include "fsdp/checkpoint/strided_box.h"

#include <algorithm>

#include "fsdp/base/error.h"

namespace fsdp {

std::vector<int64_t> strides_of(std::span<const int64_t> shape) {
  std::vector<int64_t> strides(shape.size(), 1);
  // Nobody goes along them, and products of the other sizes may be too large.
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

  // The last dims that are one stretch in both memories are one run.
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
