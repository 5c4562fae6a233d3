#include "fsdp/layout/tensor_balance.h"

#include <algorithm>
#include <functional>
#include <queue>
#include <utility>
#include <vector>

#include "fsdp/base/integer.h"

namespace fsdp {
namespace {

using Tensors = std::vector<BrickedTensor>;

// The longest-processing-time rule. `tensors` must be sorted, largest first. The result ends with
// the last owner that has any: with more owners than tensors, the first ones get one each.
std::vector<Tensors> spread(const Tensors& tensors, int64_t num_possible_owners) {
  const size_t num_owners = std::min(static_cast<size_t>(num_possible_owners), tensors.size());
  using LoadAndOwner = std::pair<int64_t, size_t>;  // the lowest owner wins among equal loads
  std::priority_queue<LoadAndOwner, std::vector<LoadAndOwner>, std::greater<>> least_loaded;
  for (size_t owner = 0; owner < num_owners; ++owner) {
    least_loaded.push({0, owner});
  }
  std::vector<Tensors> owned(num_owners);
  for (const BrickedTensor& tensor : tensors) {
    const auto [load, owner] = least_loaded.top();
    least_loaded.pop();
    owned[owner].push_back(tensor);
    least_loaded.push({checked_add(load, tensor.numel), owner});
  }
  return owned;
}

}  // namespace

Packing balance_tensors(std::span<const BrickedTensor> tensors, int64_t num_tensors,
                        MeshShape mesh) {
  Tensors sorted(tensors.begin(), tensors.end());
  std::stable_sort(
      sorted.begin(), sorted.end(),
      [](const BrickedTensor& a, const BrickedTensor& b) { return a.numel > b.numel; });
  Packing packing{.offsets = std::vector<int64_t>(static_cast<size_t>(num_tensors), 0),
                  .segments = {}};
  std::vector<Segment::UnevenShare> shares;
  int64_t at = 0;
  const std::vector<Tensors> of_inner_rank = spread(sorted, mesh.inner);
  for (size_t inner = 0; inner < of_inner_rank.size(); ++inner) {
    std::vector<Tensors> of_outer_rank = spread(of_inner_rank[inner], mesh.outer);
    for (size_t outer = 0; outer < of_outer_rank.size(); ++outer) {
      Tensors& share = of_outer_rank[outer];
      std::sort(share.begin(), share.end(),
                [](const BrickedTensor& a, const BrickedTensor& b) { return a.tensor < b.tensor; });
      const int64_t begin = at;
      for (const BrickedTensor& tensor : share) {
        packing.offsets[static_cast<size_t>(tensor.tensor)] = at;
        at = checked_add(at, tensor.numel);
      }
      shares.push_back(
          {.index = static_cast<int64_t>(inner) * mesh.outer + static_cast<int64_t>(outer),
           .numel = at - begin});
    }
  }
  packing.segments.push_back(Segment::uneven(0, shares));
  return packing;
}

}  // namespace fsdp
