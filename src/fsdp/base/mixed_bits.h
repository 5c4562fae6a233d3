// A bijection of 64 bits in which every bit of the result depends on all bits of the argument.
#pragma once

#include <cstdint>

#include "fsdp/base/host_device.h"

namespace fsdp {

// Zero stays zero.
FSDP_HOST_DEVICE inline uint64_t mixed_bits(uint64_t x) {
  x = (x ^ (x >> 32)) * 0xD6E8FEB86659FD93ull;
  x = (x ^ (x >> 32)) * 0xD6E8FEB86659FD93ull;
  return x ^ (x >> 32);
}

}  // namespace fsdp
