#include "fsdp/layout/state_bytes.h"

#include <algorithm>
#include <cmath>
#include <optional>

#include "fsdp/base/check.h"
#include "fsdp/base/integer.h"

namespace fsdp {

namespace {

constexpr int64_t kScaleBytes = sizeof(float);

}  // namespace

SharedScales shared_scales(WeightRecipe recipe, int64_t rows, int64_t columns) {
  const WeightRecipeRow& row = row_of(recipe);
  if (row.scale_bytes != 4) return {};
  SharedScales scales;
  scales.block_rows = row.scale_rows == 0 ? std::max<int64_t>(rows, 1) : row.scale_rows;
  scales.block_columns = row.scale_columns == 0 ? std::max<int64_t>(columns, 1) : row.scale_columns;
  scales.per_row = ceil_div(columns, scales.block_columns);
  scales.count = scales.per_row * ceil_div(rows, scales.block_rows);
  return scales;
}

int64_t code_bytes(const GroupTypes& types, int64_t numel) {
  return types.is_quantized() ? numel : checked_mul(numel, element_bytes(types.weight));
}

int64_t block_scale_bytes(const GroupTypes& types, int64_t numel) {
  const WeightRecipeRow& row = row_of(types.recipe);
  return row.scale_bytes == 1 ? numel / row.scale_columns : 0;
}

int64_t weight_bytes(const GroupTypes& types, int64_t numel) {
  return checked_add(code_bytes(types, numel), block_scale_bytes(types, numel));
}

int64_t offloaded_numel(int64_t shard_numel, double fraction) {
  FSDP_ASSERT(shard_numel >= 0 && fraction >= 0 && fraction <= 1);
  // A number of elements beyond 2^53 is rounded on its way to a double; the whole must stay exact.
  if (fraction == 1) return shard_numel;
  return std::llround(static_cast<double>(shard_numel) * fraction);
}

StatePlaces state_places(std::span<const ShardRange> shard, double offload_fraction) {
  const int64_t shard_numel = numel_of(shard);
  const int64_t device_numel = shard_numel - offloaded_numel(shard_numel, offload_fraction);
  StatePlaces places;
  for (const ShardRange& range : shard) {
    const int64_t cut =
        std::clamp<int64_t>(device_numel - range.local_begin, 0, range.flat.numel());
    ShardRange first = range;
    first.flat.end = range.flat.begin + cut;
    ShardRange last = range;
    last.flat.begin = first.flat.end;
    last.local_begin += cut;
    if (!first.flat.empty()) places.device.push_back(first);
    if (!last.flat.empty()) places.host.push_back(last);
  }
  return places;
}

int64_t numel_of(std::span<const ShardRange> ranges) {
  int64_t numel = 0;
  for (const ShardRange& range : ranges) numel += range.flat.numel();
  return numel;
}

int64_t num_scales(FlatRange flat) {
  if (flat.empty()) return 0;
  return ceil_div(flat.end, kScaleBlock) - flat.begin / kScaleBlock;
}

int64_t moment_bytes(DType dtype, FlatRange flat) {
  const int64_t values = checked_mul(flat.numel(), element_bytes(dtype));
  return is_scaled(dtype) ? checked_add(values, kScaleBytes * num_scales(flat)) : values;
}

int64_t moments_bytes(const GroupTypes& types, std::span<const ShardRange> ranges) {
  int64_t bytes = 0;
  for (const std::optional<DType> moment : {types.first_moment, types.second_moment}) {
    if (!moment) continue;
    for (const ShardRange& range : ranges)
      bytes = checked_add(bytes, moment_bytes(*moment, range.flat));
  }
  return bytes;
}

int64_t marks_bytes(std::span<const ShardRange> ranges) {
  int64_t bytes = 0;
  for (const ShardRange& range : ranges) bytes += num_scales(range.flat) * (kScaleBlock / 8);
  return bytes;
}

int64_t host_weight_bytes(const GroupTypes& types) {
  return element_bytes(types.main_weight.value_or(types.weight));
}

}  // namespace fsdp
