// The matrices that a tensor consists of, each of which one rank owns, and what they cost its
// owner.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "fsdp/layout/segment.h"

namespace fsdp {

// A tensor of two or more dims is a column of matrices with as many columns as its last dim.
struct OwnedMatrix {
  FlatRange range;  // in the flattened tensor
  int64_t rows = 0;
  int64_t columns = 0;

  friend bool operator==(const OwnedMatrix&, const OwnedMatrix&) = default;
};

// `rows` are those of the matrices from the top, again and again until the tensor ends: a gate and
// an up projection in one tensor, or the experts of a bank, are matrices of their own. Empty: one
// matrix, or one for each index of the dims before the last two.
std::vector<OwnedMatrix> matrix_parts(std::span<const int64_t> shape,
                                      std::span<const int64_t> rows);

// The products of one Newton-Schulz iteration, in flops: with the shorter side m and the longer one
// n, X X^T and B X take 2 m m n each, and A A takes 2 m m m.
int64_t newton_schulz_flops(int64_t rows, int64_t columns);

// Numbers that an iteration has in memory: X twice, A and B.
int64_t newton_schulz_numel(int64_t rows, int64_t columns);

}  // namespace fsdp
