#include "fsdp/layout/brick.h"

#include <algorithm>
#include <numeric>

#include "fsdp/base/integer.h"

namespace fsdp {

BrickedTensor bricked(int64_t tensor, int64_t numel, int64_t indivisible_numel,
                      int64_t align_numel) {
  const int64_t padded = round_up(numel, align_numel);
  int64_t brick = 0;
  const bool overflows = __builtin_mul_overflow(
      indivisible_numel / std::gcd(indivisible_numel, align_numel), align_numel, &brick);
  return {.tensor = tensor,
          .numel = padded,
          .brick_numel = overflows ? padded : std::min(brick, padded)};
}

}  // namespace fsdp
