// Values that come one by one, in rank order, added in the tree of SumOrder: the same source for
// the host and for kernels.
#pragma once

#include <cstdint>

#include "fsdp/base/compiler.h"

namespace fsdp {

// Sums of fewer values than 2^kLevels, as the digits of a binary number: held[level] is the sum of
// 2^level neighbours where that digit of their number is 1. Loops have constant bounds and indices,
// so that a kernel keeps all of it in registers once they are unrolled.
template <typename Number, int kLevels>
struct SumTree {
  Number held[kLevels];

  // The next value, of which `before` have come.
  FSDP_HOST_DEVICE void add(Number value, int32_t before) {
    bool is_carried = true;
    FSDP_UNROLLED
    for (int level = 0; level < kLevels; ++level) {
      if (!is_carried) continue;
      is_carried = (before >> level & 1) != 0;
      if (is_carried)
        value = held[level] + value;
      else
        held[level] = value;
    }
  }

  // The sum of all `count` values, which are one at least.
  FSDP_HOST_DEVICE Number total(int32_t count) const {
    Number sum = 0;
    bool is_first = true;
    FSDP_UNROLLED
    for (int level = 0; level < kLevels; ++level) {
      if ((count >> level & 1) == 0) continue;
      sum = is_first ? held[level] : held[level] + sum;
      is_first = false;
    }
    return sum;
  }
};

}  // namespace fsdp
