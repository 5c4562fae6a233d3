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
