// Moments as fp32 numbers, whatever they are kept in: for checkpoints. Host memory.
#pragma once

#include <cstdint>

#include "fsdp/layout/segment.h"
#include "fsdp/optim/update_span.h"

namespace fsdp {

enum class MomentRole : uint8_t {
  kFirst,
  kSecond,  // scaled types keep its root
};

// `flat` says which elements of the group's whole buffer the moment has. What read_moment() gives
// is exact, and write_moment() of it restores every value bit by bit (scales, being powers of two,
// may come out as other ones that mean the same). Other values are rounded to nearest.
void read_moment(const Moment& moment, MomentRole role, FlatRange flat, float* values);
void write_moment(const float* values, MomentRole role, FlatRange flat, const Moment& moment);

}  // namespace fsdp
