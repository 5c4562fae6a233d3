// A pool without memory of its own: every bucket comes from the allocator and goes back to it.
#pragma once

#include <memory>

#include "fsdp/memory/bucket_pool.h"
#include "fsdp/memory/live_trace.h"

namespace fsdp {

// `trace` is what the forecast of the peak is computed from.
std::unique_ptr<BucketPool> make_on_demand_pool(BucketTable table, LiveTrace trace,
                                                int64_t alignment, SlabAllocator& allocator);

}  // namespace fsdp
