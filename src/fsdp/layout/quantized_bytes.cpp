#include "fsdp/layout/quantized_bytes.h"

#include <algorithm>

#include "fsdp/base/integer.h"

namespace fsdp {

namespace {

constexpr int64_t kFourBytes = 4;

}  // namespace

SharedScales shared_scales(WeightRecipe recipe, int64_t rows, int64_t columns) {
  const WeightRecipeRow& row = row_of(recipe);
  if (row.scale_bytes != kFourBytes && !row.has_matrix_scale) return {};
  const bool is_of_matrix = row.has_matrix_scale || row.scale_rows == 0;
  SharedScales scales;
  scales.block_rows = is_of_matrix ? std::max<int64_t>(rows, 1) : row.scale_rows;
  scales.block_columns =
      is_of_matrix || row.scale_columns == 0 ? std::max<int64_t>(columns, 1) : row.scale_columns;
  scales.per_row = ceil_div(columns, scales.block_columns);
  scales.count = scales.per_row * ceil_div(rows, scales.block_rows);
  return scales;
}

int64_t shared_scale_bytes(WeightScaling scaling) {
  return kFourBytes * (3 + (scaling == WeightScaling::kDelayed ? kAmaxHistory + 1 : 0));
}

int64_t code_bytes(const GroupTypes& types, int64_t numel) {
  if (!types.is_quantized()) return checked_mul(numel, element_bytes(types.weight));
  return numel / 8 * row_of(types.recipe).code_bits;
}

int64_t block_scale_bytes(const GroupTypes& types, int64_t numel) {
  const WeightRecipeRow& row = row_of(types.recipe);
  return row.scale_bytes == 1 ? numel / row.scale_columns : 0;
}

int64_t weight_bytes(const GroupTypes& types, int64_t numel) {
  return checked_add(code_bytes(types, numel), block_scale_bytes(types, numel));
}

}  // namespace fsdp
