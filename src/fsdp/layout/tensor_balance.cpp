#include "fsdp/layout/tensor_balance.h"

#include <algorithm>
#include <compare>
#include <functional>
#include <map>
#include <queue>
#include <vector>

#include "fsdp/base/integer.h"

namespace fsdp {
namespace {

struct Owner {
  int64_t load = 0;
  int64_t index = 0;  // decides between equal loads

  friend auto operator<=>(const Owner&, const Owner&) = default;
};

// As many owners as can get a tensor, those with the least load. Without loads they are the first
// ones, so that nothing here is proportional to the number of ranks.
std::vector<Owner> candidates(int64_t num_possible, size_t num_tensors,
                              std::span<const int64_t> loads) {
  const auto num_owners = std::min(num_possible, static_cast<int64_t>(num_tensors));
  std::vector<Owner> owners(static_cast<size_t>(loads.empty() ? num_owners : num_possible));
  for (size_t i = 0; i < owners.size(); ++i)
    owners[i] = {loads.empty() ? 0 : loads[i], static_cast<int64_t>(i)};
  std::partial_sort(owners.begin(), owners.begin() + num_owners, owners.end());
  owners.resize(static_cast<size_t>(num_owners));
  return owners;
}

// The longest-processing-time rule: owner -> its tensors. `tensors` must be sorted, largest first.
std::map<int64_t, BrickedTensors> spread(const BrickedTensors& tensors, int64_t num_possible_owners,
                                         std::span<const int64_t> loads) {
  const std::vector<Owner> owners = candidates(num_possible_owners, tensors.size(), loads);
  std::priority_queue<Owner, std::vector<Owner>, std::greater<>> least_loaded(owners.begin(),
                                                                              owners.end());
  std::map<int64_t, BrickedTensors> owned;
  for (const BrickedTensor& tensor : tensors) {
    const Owner owner = least_loaded.top();
    least_loaded.pop();
    owned[owner.index].push_back(tensor);
    least_loaded.push({checked_add(owner.load, tensor.numel), owner.index});
  }
  return owned;
}

// The load of each inner rank: what its outer ranks hold together.
std::vector<int64_t> inner_loads(std::span<const int64_t> held_load, MeshShape mesh) {
  if (held_load.empty()) return {};
  std::vector<int64_t> loads(static_cast<size_t>(mesh.inner), 0);
  for (size_t share = 0; share < held_load.size(); ++share) {
    int64_t& load = loads[share / static_cast<size_t>(mesh.outer)];
    load = checked_add(load, held_load[share]);
  }
  return loads;
}

}  // namespace

Packing balance_tensors(std::span<const BrickedTensor> tensors, int64_t num_tensors, MeshShape mesh,
                        std::span<const int64_t> held_load) {
  BrickedTensors sorted(tensors.begin(), tensors.end());
  std::stable_sort(
      sorted.begin(), sorted.end(),
      [](const BrickedTensor& a, const BrickedTensor& b) { return a.numel > b.numel; });
  Packing packing{.offsets = std::vector<int64_t>(static_cast<size_t>(num_tensors), 0),
                  .segments = {}};
  std::vector<Segment::UnevenShare> shares;
  int64_t at = 0;
  const auto outer = static_cast<size_t>(mesh.outer);
  for (const auto& [inner, of_inner] : spread(sorted, mesh.inner, inner_loads(held_load, mesh))) {
    const auto held = held_load.empty()
                          ? held_load
                          : held_load.subspan(static_cast<size_t>(inner) * outer, outer);
    for (auto& [outer_rank, share] : spread(of_inner, mesh.outer, held)) {
      BrickedTensors in_order = share;
      std::sort(in_order.begin(), in_order.end(),
                [](const BrickedTensor& a, const BrickedTensor& b) { return a.tensor < b.tensor; });
      const int64_t begin = at;
      for (const BrickedTensor& tensor : in_order) {
        packing.offsets[static_cast<size_t>(tensor.tensor)] = at;
        at = checked_add(at, tensor.numel);
      }
      shares.push_back({.index = inner * mesh.outer + outer_rank, .numel = at - begin});
    }
  }
  packing.segments.push_back(Segment::uneven(0, shares));
  return packing;
}

}  // namespace fsdp
