// A pool knows this before it allocates anything: the units of a model and their buckets.
#pragma once

#include <compare>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "fsdp/base/dtype.h"
#include "fsdp/layout/flat_layout.h"
#include "fsdp/layout/group_types.h"
#include "fsdp/layout/strategy.h"

namespace fsdp {

// Weights and gradients have different lives (a weight is gathered ahead of its use, a gradient
// lives until its reduction ends), so a pool with slots counts them apart.
enum class BucketRole : uint8_t { kWeight, kGradient };

// "weight", "gradient"
std::string_view name_of(BucketRole role);

inline constexpr int kNumBucketRoles = 2;

// A bucket by its place in the declaration: small integers, so that the hot path neither hashes nor
// compares names.
struct BucketId {
  int32_t unit = -1;
  int32_t bucket = -1;
  friend auto operator<=>(const BucketId&, const BucketId&) = default;
};

// One contiguous piece of temporary memory: the gathered weights or the unreduced gradients of one
// parameter group.
struct Bucket {
  std::string name;                       // unique within its unit, e.g. "weight.bf16"
  int64_t bytes = 0;                      // the padded size of the flat layout; 0 is allowed
  DType dtype = DType::kBFloat16;         // of the elements
  BucketRole role = BucketRole::kWeight;  // whether it lives as weights or as gradients do
};

// One gather/reduce granule.
struct UnitBuckets {
  std::string name;             // unique within the model, e.g. "layers.3"
  std::vector<Bucket> buckets;  // in the order in which they are acquired
};

// An immutable declaration: every bucket also has a flat index, in declaration order,
// which is what pools index their arrays with.
class BucketTable {
 public:
  explicit BucketTable(std::vector<UnitBuckets> units);

  std::span<const UnitBuckets> units() const { return units_; }
  int32_t num_units() const { return static_cast<int32_t>(units_.size()); }
  int32_t num_buckets() const { return first_of_unit_.back(); }

  // Throws for an id that was never declared.
  int32_t index_of(BucketId id) const {
    if (!contains(id)) [[unlikely]]
      throw_unknown(id);
    return first_of_unit_[static_cast<size_t>(id.unit)] + id.bucket;
  }
  int32_t first_of_unit(int32_t unit) const { return first_of_unit_[static_cast<size_t>(unit)]; }
  BucketId id_of(int32_t index) const { return ids_[static_cast<size_t>(index)]; }

  const Bucket& bucket(BucketId id) const;
  const Bucket& bucket(int32_t index) const { return bucket(id_of(index)); }
  const std::string& unit_name(int32_t unit) const {
    return units_[static_cast<size_t>(unit)].name;
  }

  // "unit 'layers.3' bucket 'weight.bf16'", the way every message names a bucket.
  std::string text(BucketId id) const;

 private:
  bool contains(BucketId id) const {
    return id.unit >= 0 && id.unit < num_units() && id.bucket >= 0 &&
           id.bucket < first_of_unit_[static_cast<size_t>(id.unit) + 1] - first_of_unit(id.unit);
  }
  [[noreturn]] void throw_unknown(BucketId id) const;

  std::vector<UnitBuckets> units_;
  std::vector<int32_t> first_of_unit_;  // one past the last unit too
  std::vector<BucketId> ids_;           // by flat index
};

// The buckets that the group's unit declares, weight first.
struct GroupBuckets {
  std::optional<Bucket> weight;    // to gather into
  std::optional<Bucket> gradient;  // to reduce from, in the type that travels
};

// Under lanes gradients have a bucket always: each lane's are whole before they are added.
enum class GradientSlab : uint8_t { kWhereExchanged, kAlways };

// A group needs a bucket exactly where its buffer is cut into more than one part. Both have the
// padded size of the whole group. Named after role, weight type and, where it applies, "frozen",
// "matrices" and the group's grid: "weight.bf16", "gradient.bf16", "weight.bf16.frozen",
// "weight.bf16.expert"; so the groups of a unit, which differ in one of them, have different names.
// `mesh` is the grid's.
GroupBuckets group_buckets(const FlatLayout& layout, const GroupTypes& types,
                           const Strategy& strategy, MeshShape mesh, std::string_view grid = "",
                           GradientSlab gradients = GradientSlab::kWhereExchanged);

}  // namespace fsdp
