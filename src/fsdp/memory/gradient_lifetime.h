// How long main gradients own memory: what the engine does and forecasts reckon with.
#pragma once

#include <cstdint>

namespace fsdp {

// How long a unit's main gradients own memory.
enum class GradientLifetime : uint8_t {
  // For good: fixed addresses, which graphs need.
  kPersistent,
  // From the unit's first reduction of a cycle until zero_grad(), so that they never coexist with
  // the activations of the forward.
  kStep,
};

}  // namespace fsdp
