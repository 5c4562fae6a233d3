// Collectives under way between the ranks of a tp group that have slices of a tensor along one dim.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

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

}  // namespace fsdp::nn
