#include "fsdp/memory/bucket.h"

#include <set>
#include <string_view>

#include "fsdp/base/check.h"
#include "fsdp/base/text.h"

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

namespace {

void check_names_and_sizes(std::span<const UnitBuckets> units) {
  std::set<std::string_view> unit_names;
  for (const UnitBuckets& unit : units) {
    FSDP_CHECK(unit_names.insert(unit.name).second, "unit '", unit.name,
               "' is declared twice; give every unit its own name");
    std::set<std::string_view> bucket_names;
    for (const Bucket& bucket : unit.buckets) {
      FSDP_CHECK(bucket_names.insert(bucket.name).second, "unit '", unit.name,
                 "' declares bucket '", bucket.name, "' twice; give every bucket its own name");
      FSDP_CHECK(bucket.bytes >= 0, "unit '", unit.name, "' bucket '", bucket.name, "' has ",
                 bucket.bytes, " bytes; sizes must be 0 or more");
      FSDP_CHECK(bucket.bytes % element_bytes(bucket.dtype) == 0, "unit '", unit.name, "' bucket '",
                 bucket.name, "' has ", bucket.bytes, " bytes, which is no whole number of ",
                 name_of(bucket.dtype), " elements; declare the padded size of its flat layout");
    }
  }
}

void require_same_bucket(const std::string& unit, const Bucket& declared, const Bucket& now) {
  FSDP_CHECK(declared.name == now.name, "unit '", unit, "' had bucket '", declared.name,
             "' where it now has '", now.name, "'; a changed model needs a new pool");
  FSDP_CHECK(declared.bytes == now.bytes, "unit '", unit, "' bucket '", now.name, "' changed from ",
             declared.bytes, " to ", now.bytes, " bytes; a changed model needs a new pool");
  FSDP_CHECK(declared.dtype == now.dtype, "unit '", unit, "' bucket '", now.name, "' changed from ",
             name_of(declared.dtype), " to ", name_of(now.dtype),
             "; a changed precision needs a new pool");
  FSDP_CHECK(declared.role == now.role, "unit '", unit, "' bucket '", now.name, "' changed from ",
             name_of(declared.role), " to ", name_of(now.role),
             "; a changed model needs a new pool");
}

}  // namespace

BucketTable::BucketTable(std::vector<UnitBuckets> units) : units_(std::move(units)) {
  check_names_and_sizes(units_);
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

void BucketTable::require_same(std::span<const UnitBuckets> units) const {
  FSDP_CHECK(units.size() == units_.size(), "the pool was declared with ", units_.size(),
             " units and is now declared with ", units.size(),
             "; a changed model needs a new pool");
  for (size_t i = 0; i < units.size(); ++i) {
    const UnitBuckets& declared = units_[i];
    FSDP_CHECK(declared.name == units[i].name, "unit ", i, " was '", declared.name,
               "' and is now '", units[i].name, "'; a changed model needs a new pool");
    FSDP_CHECK(declared.buckets.size() == units[i].buckets.size(), "unit '", declared.name,
               "' had ", declared.buckets.size(), " buckets and now has ", units[i].buckets.size(),
               "; a changed model needs a new pool");
    for (size_t j = 0; j < declared.buckets.size(); ++j) {
      require_same_bucket(declared.name, declared.buckets[j], units[i].buckets[j]);
    }
  }
}

void BucketTable::throw_unknown(BucketId id) const {
  if (id.unit < 0 || id.unit >= num_units()) {
    throw Error(concat("unit ", id.unit, " bucket ", id.bucket, " is unknown: the pool has ",
                       num_units(), " units; use an id of the declaration"));
  }
  const UnitBuckets& unit = units_[static_cast<size_t>(id.unit)];
  throw Error(concat("bucket ", id.bucket, " of unit '", unit.name, "' is unknown: the unit has ",
                     unit.buckets.size(), " buckets; use an id of the declaration"));
}

}  // namespace fsdp
