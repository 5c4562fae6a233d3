#include "fsdp/layout/matrix_balance.h"

#include <algorithm>

#include "fsdp/base/integer.h"

namespace fsdp {
namespace {

// Matrices of one tensor that have one owner.
struct OwnedRun {
  int64_t numel = 0;  // to the next aligned element
  int64_t cost = 0;
};

std::vector<OwnedRun> owned_runs(const BrickedTensor& tensor, std::span<const OwnedMatrix> parts,
                                 int64_t align_numel) {
  std::vector<OwnedRun> runs;
  int64_t begin = 0;
  int64_t cost = 0;
  for (size_t i = 0; i < parts.size(); ++i) {
    cost = checked_add(cost, newton_schulz_flops(parts[i].rows, parts[i].columns));
    const int64_t end = i + 1 < parts.size() ? parts[i].range.end : tensor.numel;
    if (end % align_numel != 0) continue;
    runs.push_back({end - begin, cost});
    begin = end;
    cost = 0;
  }
  return runs;
}

// How many of the runs each owner gets, in order, if none may come to more than `level`; fewer in
// all than there are if that cannot be.
std::vector<size_t> fill(std::span<const OwnedRun> runs, std::span<const int64_t> loads,
                         int64_t level) {
  std::vector<size_t> counts(loads.size(), 0);
  size_t next = 0;
  for (size_t owner = 0; owner < loads.size() && next < runs.size(); ++owner)
    for (int64_t load = loads[owner]; next < runs.size() && runs[next].cost <= level - load;
         ++next) {
      load += runs[next].cost;
      ++counts[owner];
    }
  return counts;
}

// For the lowest level at which all find an owner.
std::vector<size_t> spread_runs(std::span<const OwnedRun> runs, std::span<const int64_t> loads) {
  int64_t total = 0;
  for (const OwnedRun& run : runs) total = checked_add(total, run.cost);
  int64_t low = -1;  // too low, or untried
  int64_t high = checked_add(*std::min_element(loads.begin(), loads.end()), total);
  while (high - low > 1) {
    const int64_t level = low + (high - low) / 2;
    size_t placed = 0;
    for (const size_t count : fill(runs, loads, level)) placed += count;
    (placed == runs.size() ? high : low) = level;
  }
  return fill(runs, loads, high);
}

}  // namespace

Packing balance_matrices(std::span<const BrickedTensor> tensors,
                         std::span<const std::vector<OwnedMatrix>> parts, int64_t align_numel,
                         MeshShape mesh, std::span<const int64_t> held_load) {
  Packing packing{.offsets = std::vector<int64_t>(parts.size(), 0), .segments = {}};
  std::vector<OwnedRun> runs;
  int64_t end = 0;
  for (const BrickedTensor& tensor : tensors) {
    const auto index = static_cast<size_t>(tensor.tensor);
    packing.offsets[index] = end;
    end = checked_add(end, tensor.numel);
    const std::vector<OwnedRun> own = owned_runs(tensor, parts[index], align_numel);
    runs.insert(runs.end(), own.begin(), own.end());
  }
  std::vector<int64_t> held(held_load.begin(), held_load.end());
  held.resize(static_cast<size_t>(mesh.inner * mesh.outer), 0);
  const auto outer = static_cast<size_t>(mesh.outer);
  std::vector<int64_t> inner_loads(static_cast<size_t>(mesh.inner), 0);
  for (size_t share = 0; share < held.size(); ++share)
    inner_loads[share / outer] = checked_add(inner_loads[share / outer], held[share]);

  std::vector<Segment::UnevenShare> shares;
  std::span<const OwnedRun> rest = runs;
  const std::vector<size_t> of_inner = spread_runs(rest, inner_loads);
  for (size_t inner = 0; inner < of_inner.size(); ++inner) {
    if (of_inner[inner] == 0) continue;
    const std::span<const int64_t> loads = std::span(held).subspan(inner * outer, outer);
    const std::vector<size_t> of_outer = spread_runs(rest.first(of_inner[inner]), loads);
    for (size_t i = 0; i < outer; ++i) {
      int64_t numel = 0;
      for (const OwnedRun& run : rest.first(of_outer[i])) numel += run.numel;
      rest = rest.subspan(of_outer[i]);
      if (numel > 0) shares.push_back({static_cast<int64_t>(inner * outer + i), numel});
    }
  }
  packing.segments.push_back(Segment::uneven(0, shares));
  return packing;
}

}  // namespace fsdp
