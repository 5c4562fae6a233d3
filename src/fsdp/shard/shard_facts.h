// What fully_shard() is called with, as facts that ranks compare.
#pragma once

#include <c10/core/Device.h>

#include "fsdp/comm/rank_facts.h"
#include "fsdp/shard/module_units.h"
#include "fsdp/shard/options.h"

namespace fsdp {

// The options, by the names of their fields, then every parameter in the order in which shards are
// laid out. `device` is where the buffers will be.
RankFacts shard_facts(const ShardOptions& options, c10::Device device, const ModuleUnits& found);

}  // namespace fsdp
