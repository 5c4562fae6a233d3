// AdamW on one element, on hosts and devices alike.
#pragma once

#include <cmath>

#include "fsdp/base/host_device.h"
#include "fsdp/optim/step_state.h"
#include "fsdp/optim/update_rules.h"

namespace fsdp {

// What is the same for all elements of a span in one step: computed in fp64, rounded once.
struct AdamWFactors {
  float gradient = 1.0f;
  float decay = 1.0f;  // what weight decay leaves of a weight
  float beta1 = 0.0f;
  float beta1_rest = 1.0f;  // 1 - beta1
  float beta2 = 0.0f;
  float beta2_rest = 1.0f;
  float step_size = 0.0f;
  float eps = 0.0f;
};

// torch divides by sqrt(v) / s + eps, s = sqrt(1 - beta2^t); with s pulled out of the denominator
// one division per element remains.
FSDP_HOST_DEVICE inline AdamWFactors adamw_factors(const AdamWRule& rule, const StepState& state,
                                                   float rate_scale, float weight_decay) {
  const double rate = state.learning_rate * static_cast<double>(rate_scale);
  const double s = sqrt(1.0 - state.beta2_power);
  const double step_size = rate / (1.0 - state.beta1_power);
  return {.gradient = state.gradient_factor,
          .decay = static_cast<float>(1.0 - rate * static_cast<double>(weight_decay)),
          .beta1 = static_cast<float>(rule.beta1),
          .beta1_rest = static_cast<float>(1.0 - rule.beta1),
          .beta2 = static_cast<float>(rule.beta2),
          .beta2_rest = static_cast<float>(1.0 - rule.beta2),
          .step_size = static_cast<float>(step_size * s),
          .eps = static_cast<float>(rule.eps * s)};
}

// Products and sums are fused where it is written, and nowhere else: fused or not, a result is the
// same on every machine. (Hosts without fused operations, x86-64 before 2013, are slow here.)
FSDP_HOST_DEVICE inline void adamw_element(const AdamWFactors& by, float gradient, float& weight,
                                           float& first, float& second) {
  const float g = gradient * by.gradient;
  const float m = fmaf(g, by.beta1_rest, first * by.beta1);
  const float v = fmaf(g * g, by.beta2_rest, second * by.beta2);
  first = m;
  second = v;
  const float change = by.step_size * m / (sqrtf(v) + by.eps);
  weight = fmaf(weight, by.decay, -change);
}

}  // namespace fsdp
