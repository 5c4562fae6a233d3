// What all parameter groups of one sharded model have in common.
#pragma once

#include <c10/core/Device.h>

#include "fsdp/comm/mesh.h"
#include "fsdp/layout/strategy.h"
#include "fsdp/memory/slab_allocator.h"
#include "fsdp/shard/options.h"
#include "fsdp/shard/wire_slots.h"

namespace fsdp {

// Where each kind of buffer takes its memory from.
struct GroupMemory {
  SlabAllocator& weight;
  SlabAllocator& main_weight;
  SlabAllocator& main_grad;
  SlabAllocator& host;  // offloaded main weights
};

struct GroupSetting {
  const Mesh& mesh;
  MeshShape shape;
  MeshCoordinate rank;
  c10::Device device;
  Strategy strategy;  // of this unit; a unit may keep its weights whole
  PrecisionTypes precision;
  Granularity granularity;
  GradientOf gradient = GradientOf::kMeanOverRanks;
  GradientLifetime gradient_lifetime = GradientLifetime::kPersistent;
  Offload offload;
  GroupMemory memory;
  WireSlots& wire_slots;
};

}  // namespace fsdp
