#include "fsdp/layout/matrix_owners.h"

#include <algorithm>
#include <map>
#include <tuple>
#include <utility>
#include <vector>

#include "fsdp/base/check.h"
#include "fsdp/base/integer.h"
#include "fsdp/layout/matrix_balance.h"
#include "fsdp/layout/matrix_parts.h"

namespace fsdp {
namespace {

// Matrices of one tensor that meet at unaligned elements, where no share can begin.
struct MatrixRun {
  size_t num_matrices = 0;
  int64_t cost = 0;
  int64_t owner = 0;
};

struct TensorRuns {
  size_t request = 0;
  size_t tensor = 0;
  std::vector<MatrixRun> runs;
};

std::vector<MatrixRun> runs_of(const FlatLayoutRequest& request, size_t tensor) {
  const int64_t align_numel = request.align_bytes / request.element_bytes;
  std::vector<MatrixRun> runs;
  bool begins = true;
  for (const OwnedMatrix& part :
       matrix_parts(request.shapes[tensor], request.matrix_rows[tensor])) {
    if (begins) runs.emplace_back();
    runs.back().cost = checked_add(runs.back().cost, newton_schulz_flops(part.rows, part.columns));
    ++runs.back().num_matrices;
    begins = part.range.end % align_numel == 0;
  }
  return runs;
}

void deal_to_inner_ranks(std::span<TensorRuns> tensors, int64_t inner_ranks) {
  std::vector<CostColumn> columns;
  for (const TensorRuns& tensor : tensors) {
    CostColumn& column = columns.emplace_back();
    column.group = static_cast<int64_t>(tensor.request);
    for (const MatrixRun& run : tensor.runs) column.costs.push_back(run.cost);
  }
  const ColumnOwners owners = balance_columns(columns, inner_ranks);
  for (size_t i = 0; i < tensors.size(); ++i)
    for (size_t k = 0; k < tensors[i].runs.size(); ++k) tensors[i].runs[k].owner = owners[i][k];
}

// Owners become shares.
void deal_to_outer_ranks(std::span<TensorRuns> tensors, int64_t outer_ranks) {
  std::stable_sort(tensors.begin(), tensors.end(), [](const TensorRuns& a, const TensorRuns& b) {
    return std::tuple(a.request, a.runs.front().owner, a.runs.back().owner) <
           std::tuple(b.request, b.runs.front().owner, b.runs.back().owner);
  });
  struct Held {
    std::vector<CostColumn> columns;  // one for each group
    std::vector<MatrixRun*> runs;     // of all columns
  };
  std::map<int64_t, Held> by_inner_rank;
  for (TensorRuns& tensor : tensors)
    for (MatrixRun& run : tensor.runs) {
      auto& [columns, runs] = by_inner_rank[run.owner];
      const auto group = static_cast<int64_t>(tensor.request);
      if (columns.empty() || columns.back().group != group)
        columns.push_back({.group = group, .costs = {}});
      columns.back().costs.push_back(run.cost);
      runs.push_back(&run);
    }
  for (const auto& [inner, held] : by_inner_rank) {
    auto run = held.runs.begin();
    for (const std::vector<int64_t>& of_group : balance_columns(held.columns, outer_ranks))
      for (const int64_t outer : of_group) (*run++)->owner = inner * outer_ranks + outer;
  }
}

void check_owners(const FlatLayoutRequest& request, size_t tensor, size_t num_matrices) {
  const std::vector<int64_t>& owners = request.matrix_owners[tensor];
  FSDP_CHECK(owners.size() == num_matrices, "matrix_owners has ", owners.size(),
             " entries for tensor ", tensor, ", which has ", num_matrices,
             " matrices; give one per matrix");
  const int64_t num_shares = request.inner_ranks * request.outer_ranks;
  for (const int64_t owner : owners)
    FSDP_CHECK(0 <= owner && owner < num_shares, "matrix_owners has ", owner, " for tensor ",
               tensor, "; use shares from 0 to ", num_shares - 1);
}

}  // namespace

void deal_matrices(std::span<FlatLayoutRequest* const> requests) {
  std::vector<TensorRuns> tensors;
  for (size_t r = 0; r < requests.size(); ++r) {
    FlatLayoutRequest& request = *requests[r];
    FSDP_ASSERT(request.inner_ranks == requests[0]->inner_ranks &&
                    request.outer_ranks == requests[0]->outer_ranks,
                "request ", r, " is for other ranks");
    request.matrix_owners.assign(request.matrix_rows.size(), {});
    for (size_t i = 0; i < request.matrix_rows.size(); ++i)
      if (std::vector<MatrixRun> runs = runs_of(request, i); !runs.empty())
        tensors.push_back({.request = r, .tensor = i, .runs = std::move(runs)});
  }
  if (tensors.empty()) return;
  deal_to_inner_ranks(tensors, requests[0]->inner_ranks);
  deal_to_outer_ranks(tensors, requests[0]->outer_ranks);
  for (const TensorRuns& tensor : tensors) {
    std::vector<int64_t>& owners = requests[tensor.request]->matrix_owners[tensor.tensor];
    for (const MatrixRun& run : tensor.runs)
      owners.insert(owners.end(), run.num_matrices, run.owner);
  }
}

Packing pack_matrices(std::span<const BrickedTensor> tensors, const FlatLayoutRequest& request) {
  const int64_t align_numel = request.align_bytes / request.element_bytes;
  Packing packing{.offsets = std::vector<int64_t>(request.shapes.size(), 0), .segments = {}};
  const auto parts_of = [&](const BrickedTensor& tensor) {
    const auto i = static_cast<size_t>(tensor.tensor);
    return matrix_parts(request.shapes[i], request.matrix_rows[i]);
  };
  const auto owners_of = [&](const BrickedTensor& tensor) -> const std::vector<int64_t>& {
    return request.matrix_owners[static_cast<size_t>(tensor.tensor)];
  };
  for (const BrickedTensor& tensor : tensors)
    check_owners(request, static_cast<size_t>(tensor.tensor), parts_of(tensor).size());
  BrickedTensors in_order(tensors.begin(), tensors.end());
  std::stable_sort(in_order.begin(), in_order.end(),
                   [&](const BrickedTensor& a, const BrickedTensor& b) {
                     return std::pair(owners_of(a).front(), owners_of(a).back()) <
                            std::pair(owners_of(b).front(), owners_of(b).back());
                   });
  std::vector<Segment::UnevenShare> shares;
  int64_t at = 0;
  for (const BrickedTensor& tensor : in_order) {
    packing.offsets[static_cast<size_t>(tensor.tensor)] = at;
    const std::vector<OwnedMatrix> parts = parts_of(tensor);
    for (size_t i = 0; i < parts.size(); ++i) {
      const int64_t owner = owners_of(tensor)[i];
      const int64_t begin = parts[i].range.begin;
      if (shares.empty() || shares.back().index != owner) {
        FSDP_CHECK(shares.empty() || shares.back().index < owner, "matrix ", i, " of tensor ",
                   tensor.tensor, " has owner ", owner, ", but what lies before it has owner ",
                   shares.back().index,
                   "; owners must ascend in a tensor, and from one tensor to the next");
        FSDP_CHECK(begin % align_numel == 0, "matrix ", i, " of tensor ", tensor.tensor,
                   " begins at element ", begin,
                   ", where no share can begin, as it is no multiple "
                   "of ",
                   align_numel, "; give it the owner of the matrix before it");
        shares.push_back({.index = owner, .numel = 0});
      }
      const int64_t end = i + 1 < parts.size() ? parts[i].range.end : tensor.numel;
      shares.back().numel = checked_add(shares.back().numel, end - begin);
    }
    at = checked_add(at, tensor.numel);
  }
  packing.segments.push_back(Segment::uneven(0, shares));
  return packing;
}

}  // namespace fsdp
