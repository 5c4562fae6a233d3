// How temporary memory is pooled, and how long gradients own theirs: the choices that options name.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>

namespace fsdp {

enum class PoolKind : uint8_t {
  kOnDemand,      // memory per bucket, allocated at acquire and freed at release
  kDoubleBuffer,  // slots of the most common unit, for that kind of unit
  kMaxPool,       // slots that fit any unit
  kPlanned,       // one arena, offsets from the live intervals of the step
};

// "on_demand", "double_buffer", "max_pool", "planned"
std::string_view name_of(PoolKind kind);
std::span<const PoolKind> all_pool_kinds();

// The place of units in a double buffer that are not like the most common one.
enum class OtherUnits : uint8_t {
  kOnDemand,    // allocated at acquire, freed at release: less memory, addresses not fixed
  kPersistent,  // own memory for good: fixed addresses
};

// The reaction to units that come in another order than in the first step, so that a unit's slot is
// taken and another one is free.
enum class OnMove : uint8_t {
  kFollow,  // take the free slot, say so once; the address is then reported as not fixed
  kRefuse,  // an error: after graph capture or registration a moved address is a wrong result
};

// How long a unit's main gradients own memory.
enum class GradientLifetime : uint8_t {
  // For good: fixed addresses, which graphs need.
  kPersistent,
  // From the unit's first reduction of a cycle until zero_grad(), so that they never coexist with
  // the activations of the forward.
  kStep,
};

}  // namespace fsdp
