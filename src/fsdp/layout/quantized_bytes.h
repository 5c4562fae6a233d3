// What quantised weights take: engine and forecast count it here, so they agree.
#pragma once

#include <cstdint>

#include "fsdp/base/compiler.h"
#include "fsdp/base/weight_recipe.h"
#include "fsdp/layout/group_types.h"

namespace fsdp {

// Scales of four bytes of one matrix: which one an element has, and how many there are.
struct SharedScales {
  int64_t block_rows = 1;
  int64_t block_columns = 1;
  int64_t per_row = 1;  // blocks side by side
  int64_t count = 0;

  FSDP_HOST_DEVICE int64_t index_of(int64_t row, int64_t column) const {
    return row / block_rows * per_row + column / block_columns;
  }
};

// kNvFp4: the one of the matrix; kMxFp8 and kPlain: none.
SharedScales shared_scales(WeightRecipe recipe, int64_t rows, int64_t columns);

// How many a buffer has room for: those of the next matrix begin where GPUs can read them.
constexpr int64_t padded_count(const SharedScales& scales) { return (scales.count + 3) / 4 * 4; }

// What a rank keeps for every shared scale: its amax, the factor of numbers, the scale of codes,
// and earlier amaxes if scaling is delayed.
int64_t shared_scale_bytes(WeightScaling scaling);
inline constexpr int64_t kAmaxHistory = 16;  // updates that a delayed scale looks back at

// The weights of so many elements: numbers of their type, or codes and scales of one byte. Every
// range that begins and ends aligned has a whole number of both.
int64_t code_bytes(const GroupTypes& types, int64_t numel);
int64_t block_scale_bytes(const GroupTypes& types, int64_t numel);
int64_t weight_bytes(const GroupTypes& types, int64_t numel);

}  // namespace fsdp
