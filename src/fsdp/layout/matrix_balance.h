// Matrices spread over ranks so that no owner computes much longer than the others.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "fsdp/layout/brick.h"
#include "fsdp/layout/matrix_parts.h"
#include "fsdp/layout/strategy.h"

namespace fsdp {

// One segment with uneven shares. Tensors keep their order, because a tensor is contiguous in the
// buffer and its matrices may have different owners; so every owner gets a run of matrices. Runs
// are chosen so that the highest cost of an inner rank, with what it has of other groups
// (`held_load`, by share; empty for nothing), is as low as runs allow, and those of an inner rank
// likewise among its outer ranks. No owner has more than the mean and one matrix.
//
// `parts` are the matrices of each tensor. Two that meet at an unaligned element have one owner.
Packing balance_matrices(std::span<const BrickedTensor> tensors,
                         std::span<const std::vector<OwnedMatrix>> parts, int64_t align_numel,
                         MeshShape mesh, std::span<const int64_t> held_load);

}  // namespace fsdp
