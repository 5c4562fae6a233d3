// A pool that hands out the offsets of an arena plan, in the order of the plan.
#pragma once

#include <memory>

#include "fsdp/memory/arena/arena_planner.h"
#include "fsdp/memory/bucket_pool.h"

namespace fsdp {

// The n-th acquire of a bucket in a step gets the offset of its n-th interval in the plan. Acquires
// and releases need not come at the planned times: an address is refused only while a live bucket
// really holds bytes of it.
std::unique_ptr<BucketPool> make_planned_pool(BucketTable table, ArenaPlan plan, int64_t alignment,
                                              SlabAllocator& allocator);

}  // namespace fsdp
