// The layout of a slot made for the most common unit of the model, and what the others get.
#pragma once

#include "fsdp/memory/bucket.h"
#include "fsdp/memory/slot_pool.h"

namespace fsdp {

// Two units are alike when they have the same number of buckets with pairwise equal role, dtype and
// bytes. The largest set of units that are alike uses the slots; of equally large sets the one
// declared first.
SlotLayout double_buffer_layout(const BucketTable& table, OtherUnits other_units,
                                const SlotOptions& options);

}  // namespace fsdp
