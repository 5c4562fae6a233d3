#include "fsdp/memory/group_memory.h"

#include "fsdp/base/integer.h"
#include "fsdp/base/text.h"
#include "fsdp/layout/quantized_bytes.h"

namespace fsdp {

GroupBuckets group_buckets(const FlatLayout& layout, const GroupTypes& types,
                           const Strategy& strategy, MeshShape mesh, std::string_view grid) {
  // Whole numbers have one group only.
  const bool frozen = !types.trainable && is_floating(types.weight);
  const auto bucket = [&](BucketRole role, DType dtype, int64_t bytes) {
    return Bucket{
        concat(name_of(role), ".",
               types.is_quantized() ? row_of(types.recipe).name : name_of(types.weight),
               frozen ? ".frozen" : "", layout.request().matrix_rows.empty() ? "" : ".matrices",
               grid.empty() ? "" : ".", grid),
        bytes, dtype, role};
  };
  const int64_t numel = layout.padded_numel();
  GroupBuckets buckets;
  if (is_exchanged(strategy.parameter, mesh))
    buckets.weight =
        bucket(BucketRole::kWeight, types.is_quantized() ? DType::kUInt8 : types.weight,
               weight_bytes(types, numel));
  if (types.trainable && is_exchanged(strategy.gradient, mesh))
    buckets.gradient =
        bucket(BucketRole::kGradient, types.wire, checked_mul(numel, element_bytes(types.wire)));
  return buckets;
}

}  // namespace fsdp
