// What a slot of a pool looks like: made for any unit (max_pool), or for the most common one
// (double_buffer).
#pragma once

#include "fsdp/memory/bucket.h"
#include "fsdp/memory/pool/slot_pool.h"

namespace fsdp {

// A slot that fits any unit of the model with the fewest bytes. Per role and dtype the i-th largest
// entry is as large as the i-th largest bucket of any unit. That is the smallest multiset of
// entries into which the buckets of every single unit can be matched one to one, and matching by
// rank of size is such a match: a unit's i-th largest bucket needs i entries of at least its size,
// so no i-th largest entry can be smaller.
SlotLayout max_pool_layout(const BucketTable& table, const SlotOptions& options);

// A slot made for the most common unit of the model; the others get what `other_units` says. Two
// units are alike when they have the same number of buckets with pairwise equal role, dtype and
// bytes. The largest set of units that are alike uses the slots; of equally large sets the one
// declared first.
SlotLayout double_buffer_layout(const BucketTable& table, OtherUnits other_units,
                                const SlotOptions& options);

}  // namespace fsdp
