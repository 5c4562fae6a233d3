// The layout of a slot that fits any unit of the model with the fewest bytes.
#pragma once

#include "fsdp/memory/bucket.h"
#include "fsdp/memory/slot_pool.h"

namespace fsdp {

// Per role and dtype the i-th largest entry is as large as the i-th largest bucket of any unit.
// That is the smallest multiset of entries into which the buckets of every single unit can be
// matched one to one, and matching by rank of size is such a match: a unit's i-th largest bucket
// needs i entries of at least its size, so no i-th largest entry can be smaller.
SlotLayout max_pool_layout(const BucketTable& table, const SlotOptions& options);

}  // namespace fsdp
