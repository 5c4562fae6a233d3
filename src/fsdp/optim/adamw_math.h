// AdamW on one element, on hosts and devices alike.
#pragma once

#include <cmath>

#include "fsdp/base/host_device.h"
#include "fsdp/optim/step_state.h"
#include "fsdp/optim/update_rules.h"

namespace fsdp {

// What is the same for all elements of a span in one step: computed in fp64, rounded once.
struct AdamWFactors {
  float beta1 = 0.0f;
  float beta2 = 0.0f;
  float to_first = 0.0f;   // of a gradient as it lies in memory: unscaled, clipped, 1 - beta1
  float to_second = 0.0f;  // the same for its square: the root of 1 - beta2
  float root = -1.0f;      // of the second moment's root, in the denominator
  float eps = 0.0f;        // added to it
  float decay = 1.0f;      // what weight decay leaves of a weight
};

// torch computes  w * decay - rate / (1 - beta1^t) * m / (sqrt(v) / s + eps),  s = sqrt(1 -
// beta2^t). Here all factors of the change are in its denominator, with their sign, so that one
// root, one division and few fused operations per element remain. A learning rate of 0 makes the
// denominator infinite and the change 0; the factor of the root stays finite, since a root may be
// 0.
FSDP_HOST_DEVICE inline AdamWFactors adamw_factors(const AdamWRule& rule, const StepState& state,
                                                   float rate_scale, float weight_decay) {
  constexpr double kLargest = 3e38;
  const double rate = state.learning_rate * static_cast<double>(rate_scale);
  const double inverse = (1.0 - state.beta1_power) / rate;
  const double root = inverse / sqrt(1.0 - state.beta2_power);
  const double eps = rate == 0.0 ? inverse : inverse * rule.eps;
  const double gradient = static_cast<double>(state.gradient_factor);
  return {.beta1 = static_cast<float>(rule.beta1),
          .beta2 = static_cast<float>(rule.beta2),
          .to_first = static_cast<float>(gradient * (1.0 - rule.beta1)),
          .to_second = static_cast<float>(gradient * sqrt(1.0 - rule.beta2)),
          .root = -static_cast<float>(root < kLargest ? root : kLargest),
          .eps = -static_cast<float>(eps),
          .decay = static_cast<float>(1.0 - rate * static_cast<double>(weight_decay))};
}

// Products and sums are fused where it is written, and nowhere else: a result is the same on every
// machine. (Hosts without fused operations, x86-64 before 2013, are slow here.)
FSDP_HOST_DEVICE inline float adamw_first(const AdamWFactors& by, float gradient, float first) {
  return fmaf(gradient, by.to_first, first * by.beta1);
}
FSDP_HOST_DEVICE inline float adamw_second(const AdamWFactors& by, float gradient, float second) {
  const float g = gradient * by.to_second;
  return fmaf(g, g, second * by.beta2);
}
// By the new moments; `root` is the second one's.
FSDP_HOST_DEVICE inline float adamw_weight(const AdamWFactors& by, float first, float root,
                                           float weight) {
  return fmaf(weight, by.decay, first / fmaf(root, by.root, by.eps));
}

FSDP_HOST_DEVICE inline void adamw_element(const AdamWFactors& by, float gradient, float& weight,
                                           float& first, float& second) {
  first = adamw_first(by, gradient, first);
  second = adamw_second(by, gradient, second);
  weight = adamw_weight(by, first, sqrtf(second), weight);
}

}  // namespace fsdp
