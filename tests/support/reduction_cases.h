// The part of the communicator suite that is about sums, and the shapes both parts try.
#pragma once

#include <cstdint>
#include <numeric>
#include <span>
#include <vector>

#include "support/communicator_suite.h"

namespace fsdp::testing {

std::vector<CommunicatorCase> reduction_cases();

// The first p of n values together, the others, and both, where p is the largest power of two below
// n: level by level, as one draws it.
at::Tensor combined_in_a_tree(std::vector<at::Tensor> values, ReduceOp op);

inline const std::vector<int64_t> kSizes = {0, 1, 7, 1000};

inline std::vector<int64_t> uneven_counts(int ranks, int64_t base) {
  std::vector<int64_t> counts;
  for (int rank = 0; rank < ranks; ++rank) counts.push_back(rank % 3 == 1 ? 0 : base + 13 * rank);
  return counts;
}

inline int64_t sum(std::span<const int64_t> values) {
  return std::accumulate(values.begin(), values.end(), int64_t{0});
}

}  // namespace fsdp::testing
