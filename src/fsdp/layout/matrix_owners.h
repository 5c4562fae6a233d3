// Which share owns which matrix: chosen for all groups of a grid together, then laid out one by
// one.
#pragma once

#include <span>

#include "fsdp/layout/brick.h"
#include "fsdp/layout/flat_layout.h"

namespace fsdp {

// Sets matrix_owners of all requests with matrix_rows, which must be for the same ranks. Loads, in
// flops (newton_schulz_flops), are even over inner ranks, because with a plain strategy all outer
// ranks of one update the same; what an inner rank has of a group goes to its outer ranks in the
// order of the buffer.
void deal_matrices(std::span<FlatLayoutRequest* const> requests);

// One segment with the uneven shares that matrix_owners says; tensors lie in the order of their
// owners. Error for owners that no such buffer has.
Packing pack_matrices(std::span<const BrickedTensor> tensors, const FlatLayoutRequest& request);

}  // namespace fsdp
