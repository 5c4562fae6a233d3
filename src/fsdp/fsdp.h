// Everything a program needs that trains with fsdp.cpp.
#pragma once

#include "fsdp/base/dtype.h"
#include "fsdp/base/error.h"
#include "fsdp/base/version.h"
#include "fsdp/comm/mesh.h"
#include "fsdp/comm/world.h"
#include "fsdp/layout/flat_layout.h"
#include "fsdp/layout/strategy.h"
#include "fsdp/memory/bucket_pool.h"
#include "fsdp/memory/device_slab_allocator.h"
#include "fsdp/nn/linear.h"
#include "fsdp/shard/fully_shard.h"
#include "fsdp/shard/parameter_init.h"
#include "fsdp/shard/recompute.h"
#include "fsdp/shard/sharded.h"
#include "fsdp/shard/unit.h"
