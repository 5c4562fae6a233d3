// Which memory a parameter group needs and for how long: the same declaration for engine and
// forecast.
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>

#include "fsdp/layout/flat_layout.h"
#include "fsdp/layout/group_types.h"
#include "fsdp/layout/strategy.h"
#include "fsdp/memory/bucket.h"

namespace fsdp {

// What the group's unit declares, weight first.
struct GroupBuckets {
  std::optional<Bucket> weight;    // to gather into
  std::optional<Bucket> gradient;  // to reduce from, in the type that travels
};

// A group needs a bucket exactly where its buffer is cut into more than one part. Both have the
// padded size of the whole group. Named after role, weight type and, where it applies, "frozen",
// "matrices" and the group's grid: "weight.bf16", "gradient.bf16", "weight.bf16.frozen",
// "weight.bf16.expert"; so the groups of a unit, which differ in one of them, have different names.
// `mesh` is the grid's.
GroupBuckets group_buckets(const FlatLayout& layout, const GroupTypes& types,
                           const Strategy& strategy, MeshShape mesh, std::string_view grid = "");

}  // namespace fsdp
