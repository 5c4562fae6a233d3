// SGD on one element, on hosts and devices alike.
#pragma once

#include "fsdp/base/host_device.h"
#include "fsdp/optim/step_state.h"
#include "fsdp/optim/update_rules.h"

namespace fsdp {

// What is the same for all elements of a span in one step.
struct SgdFactors {
  float gradient = 1.0f;
  float weight_decay = 0.0f;
  float momentum = 0.0f;
  float rate = 0.0f;
};

enum class Momentum : uint8_t { kNone, kPlain, kNesterov };

FSDP_HOST_DEVICE inline Momentum momentum_kind(const SgdRule& rule) {
  if (rule.momentum == 0.0) return Momentum::kNone;
  return rule.nesterov ? Momentum::kNesterov : Momentum::kPlain;
}

FSDP_HOST_DEVICE inline SgdFactors sgd_factors(const SgdRule& rule, const StepState& state,
                                               float rate_scale, float weight_decay) {
  return {.gradient = state.gradient_factor,
          .weight_decay = weight_decay,
          .momentum = static_cast<float>(rule.momentum),
          .rate = static_cast<float>(state.learning_rate * static_cast<double>(rate_scale))};
}

// `buffer` is not touched without momentum. It begins as 0, so the first step makes it the
// gradient.
template <Momentum kMomentum>
FSDP_HOST_DEVICE inline void sgd_element(const SgdFactors& by, float gradient, float& weight,
                                         float& buffer) {
  float direction = gradient * by.gradient + by.weight_decay * weight;
  if constexpr (kMomentum != Momentum::kNone) {
    buffer = by.momentum * buffer + direction;
    direction = kMomentum == Momentum::kNesterov ? direction + by.momentum * buffer : buffer;
  }
  weight = weight - by.rate * direction;
}

}  // namespace fsdp
