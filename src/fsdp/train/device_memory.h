// How much memory a process or a device has held at most, and the engine's own by kind.
#pragma once

#include <c10/core/Device.h>

#include <cstdint>
#include <vector>

#include "fsdp/shard/sharded.h"
#include "fsdp/train/run_facts.h"

namespace fsdp::train {

// On a GPU: what libtorch's allocator had handed out at most. On a CPU: the most memory this
// process had, which is that of all its ranks, libraries included.
int64_t peak_memory_bytes(c10::Device device);

// Fills measured_bytes of the forecast's rows.
void add_measured(std::vector<MemoryRow>& rows, const MemoryReport& report);

}  // namespace fsdp::train
