#include "fsdp/nn/layers/rank_slices.h"

#include <ATen/ATen.h>

#include <vector>

namespace fsdp::nn {

// In memory the ranks' slices come one after the other, each of them whole: that is their order
// along the first dim alone, and for other dims they are copied.
GatheredSlices::GatheredSlices(const at::Tensor& own, int64_t dim, Communicator& ranks)
    : dim_(dim) {
  std::vector<int64_t> sizes = own.sizes().vec();
  sizes.insert(sizes.begin(), ranks.size());
  slices_ = at::empty(sizes, own.options());
  work_ = ranks.all_gather(slices_, own.contiguous(), "slices");
}

at::Tensor GatheredSlices::wait() {
  work_.wait();
  return slices_.movedim(0, dim_).flatten(dim_, dim_ + 1);
}

ScatteredSums::ScatteredSums(const at::Tensor& parts, int64_t dim, Communicator& ranks) {
  const at::Tensor slices =
      parts.unflatten(dim, {ranks.size(), parts.size(dim) / ranks.size()}).movedim(dim, 0);
  own_ = at::empty(slices.sizes().slice(1), parts.options());
  work_ = ranks.reduce_scatter(own_, slices.contiguous(), {}, "parts of sums");
}

at::Tensor ScatteredSums::wait() {
  work_.wait();
  return own_;
}

}  // namespace fsdp::nn
