#include "fsdp/memory/group_memory.h"

#include "fsdp/base/integer.h"
#include "fsdp/base/text.h"

namespace fsdp {

GroupBuckets group_buckets(const FlatLayout& layout, const GroupTypes& types,
                           const Strategy& strategy, MeshShape mesh, std::string_view grid) {
  // Whole numbers have one group only.
  const bool frozen = !types.trainable && is_floating(types.weight);
  const auto bucket = [&](BucketRole role, DType dtype) {
    return Bucket{concat(name_of(role), ".", name_of(types.weight), frozen ? ".frozen" : "",
                         grid.empty() ? "" : ".", grid),
                  checked_mul(layout.padded_numel(), element_bytes(dtype)), dtype, role};
  };
  GroupBuckets buckets;
  if (is_exchanged(strategy.parameter, mesh))
    buckets.weight = bucket(BucketRole::kWeight, types.weight);
  if (types.trainable && is_exchanged(strategy.gradient, mesh))
    buckets.gradient = bucket(BucketRole::kGradient, types.wire);
  return buckets;
}

}  // namespace fsdp
