#include "fsdp/memory/bucket.h"

#include "fsdp/base/check.h"
#include "fsdp/base/integer.h"
#include "fsdp/base/text.h"
#include "fsdp/layout/state_bytes.h"

namespace fsdp {

std::string_view name_of(BucketRole role) {
  switch (role) {
    case BucketRole::kWeight:
      return "weight";
    case BucketRole::kGradient:
      return "gradient";
  }
  return "?";
}

BucketTable::BucketTable(std::vector<UnitBuckets> units) : units_(std::move(units)) {
  first_of_unit_.push_back(0);
  for (int32_t unit = 0; unit < num_units(); ++unit) {
    const auto num_in_unit = static_cast<int32_t>(units_[static_cast<size_t>(unit)].buckets.size());
    for (int32_t bucket = 0; bucket < num_in_unit; ++bucket) ids_.push_back({unit, bucket});
    first_of_unit_.push_back(first_of_unit_.back() + num_in_unit);
  }
}

const Bucket& BucketTable::bucket(BucketId id) const {
  index_of(id);  // throws for an unknown id
  return units_[static_cast<size_t>(id.unit)].buckets[static_cast<size_t>(id.bucket)];
}

std::string BucketTable::text(BucketId id) const {
  return concat("unit '", unit_name(id.unit), "' bucket '", bucket(id).name, "'");
}

void BucketTable::throw_unknown(BucketId id) const {
  throw Error(concat("unit ", id.unit, " bucket ", id.bucket, " is unknown: the pool has ",
                     num_units(), " units; use an id of the declaration"));
}

GroupBuckets group_buckets(const FlatLayout& layout, const GroupTypes& types,
                           const Strategy& strategy, MeshShape mesh, std::string_view grid,
                           GradientSlab gradients) {
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
  const bool has_slab = gradients == GradientSlab::kAlways || is_exchanged(strategy.gradient, mesh);
  if (types.trainable && has_slab)
    buckets.gradient =
        bucket(BucketRole::kGradient, types.wire, checked_mul(numel, element_bytes(types.wire)));
  return buckets;
}

}  // namespace fsdp
