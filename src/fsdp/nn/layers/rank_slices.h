// Collectives between the ranks of a tp or ep group that have slices of a tensor along one dim:
// under way, and with the way back of gradients.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <vector>

#include "fsdp/comm/communicator.h"

namespace fsdp::nn {

class GatheredSlices {
 public:
  GatheredSlices(const at::Tensor& own, int64_t dim, Communicator& ranks);
  // The ranks' slices in order along the dim.
  at::Tensor wait();

 private:
  const int64_t dim_;
  at::Tensor slices_;  // [ranks, ...]
  Work work_;
};

class ScatteredSums {
 public:
  // The size along the dim must be a multiple of the number of ranks.
  ScatteredSums(const at::Tensor& parts, int64_t dim, Communicator& ranks);
  // This rank's slice of the sum of the ranks' tensors.
  at::Tensor wait();

 private:
  at::Tensor own_;
  Work work_;
};

// --- there and back -----------------------------------------------------------------------------

// The ranks' slices in order along the dim.
at::Tensor slices_gathered(const at::Tensor& own, int64_t dim, Communicator& ranks);
// This rank's slice of the sum of the ranks' tensors.
at::Tensor sums_scattered(const at::Tensor& parts, int64_t dim, Communicator& ranks);
// This rank's slice of a tensor that all have, as a view.
at::Tensor slice_kept(const at::Tensor& whole, int64_t dim, Communicator& ranks);
at::Tensor all_summed(const at::Tensor& parts, Communicator& ranks);
// `input_rows[r]` rows of the first dim go to rank r, `output_rows[r]` come from it.
at::Tensor rows_exchanged(const at::Tensor& rows, const std::vector<int64_t>& output_rows,
                          const std::vector<int64_t>& input_rows, Communicator& ranks);

using RankTransfer = std::function<at::Tensor(const at::Tensor&)>;

// there(tensor), whose gradient comes back by `back`. An Error if that is to have gradients, too.
at::Tensor along_ranks(const at::Tensor& tensor, const RankTransfer& there,
                       const RankTransfer& back);

}  // namespace fsdp::nn
