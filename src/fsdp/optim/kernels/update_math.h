// The update rules: their hyper-parameters, and AdamW and SGD on one element, on hosts and devices
// alike.
#pragma once

#include <cmath>
#include <cstdint>

#include "fsdp/base/compiler.h"
#include "fsdp/optim/kernels/begin_step.h"
#include "fsdp/optim/kernels/update_span.h"
#include "fsdp/optim/optimizer_options.h"

namespace fsdp {

// --- rules ---------------------------------------------------------------------------------------

// Adam with decoupled weight decay.
struct AdamWRule {
  double beta1 = 0.9;
  double beta2 = 0.999;
  double eps = 1e-8;
  Rounding rounding = Rounding::kNearest;
  uint64_t seed = 0;  // for random numbers, which narrow moments need, too
};

// Stochastic gradient descent, weight decay added to the gradient, as torch::optim::SGD.
struct SgdRule {
  double momentum = 0.0;  // 0: no momentum is kept, and the span's first.values is null
  bool nesterov = false;
  Rounding rounding = Rounding::kNearest;
  uint64_t seed = 0;
};

// --- AdamW ---------------------------------------------------------------------------------------

// The factors of all elements of a span in one step: computed in fp64, rounded once.
struct AdamWFactors {
  float beta1 = 0.0f;
  float beta2 = 0.0f;
  float to_first = 0.0f;   // times a gradient in memory: unscaled, clipped, 1 - beta1
  float to_second = 0.0f;  // times a gradient before squaring: the root of 1 - beta2
  float root = -1.0f;      // times the second moment's root, in the denominator
  float eps = 0.0f;        // added to the denominator
  float decay = 1.0f;      // the fraction of a weight that decay leaves
};

// By products alone, so that hosts and devices have the same bits.
FSDP_HOST_DEVICE inline double power_of(double base, int64_t exponent) {
  double power = 1.0;
  for (; exponent > 0; exponent /= 2, base *= base)
    if (exponent % 2 != 0) power *= base;
  return power;
}

// torch computes  w * decay - rate / (1 - beta1^t) * m / (sqrt(v) / s + eps),  s = sqrt(1 -
// beta2^t), where t counts the updates of this parameter. Here the denominator holds all factors of
// the change, with their sign, so that one root, one division and a few fused operations per
// element remain. A learning rate of 0 makes the denominator infinite and the change 0; the factor
// of the root stays finite, since a root may be 0.
FSDP_HOST_DEVICE inline AdamWFactors adamw_factors(const AdamWRule& rule, const StepState& state,
                                                   const UpdateSpan& span) {
  constexpr double kLargest = 3e38;
  const double rate = state.learning_rate * static_cast<double>(span.rate_scale);
  const int64_t t = state.step - span.num_missed;
  const bool misses = span.num_missed != 0;
  const double beta1_power = misses ? power_of(rule.beta1, t) : state.beta1_power;
  const double beta2_power = misses ? power_of(rule.beta2, t) : state.beta2_power;
  const double inverse = (1.0 - beta1_power) / rate;
  const double root = inverse / sqrt(1.0 - beta2_power);
  const double eps = rate == 0.0 ? inverse : inverse * rule.eps;
  const double gradient = static_cast<double>(state.gradient_factor);
  return {.beta1 = static_cast<float>(rule.beta1),
          .beta2 = static_cast<float>(rule.beta2),
          .to_first = static_cast<float>(gradient * (1.0 - rule.beta1)),
          .to_second = static_cast<float>(gradient * sqrt(1.0 - rule.beta2)),
          .root = -static_cast<float>(root < kLargest ? root : kLargest),
          .eps = -static_cast<float>(eps),
          .decay = static_cast<float>(1.0 - rate * static_cast<double>(span.weight_decay))};
}

// Products and sums are fused only where the code says so, which gives the same result on every
// machine. (Hosts without fused operations, x86-64 before 2013, are slow here.)
FSDP_HOST_DEVICE inline float adamw_first(const AdamWFactors& by, float gradient, float first) {
  return fmaf(gradient, by.to_first, first * by.beta1);
}
FSDP_HOST_DEVICE inline float adamw_second(const AdamWFactors& by, float gradient, float second) {
  const float g = gradient * by.to_second;
  return fmaf(g, g, second * by.beta2);
}
// From the new moments; `root` is that of the second one.
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

// --- SGD -----------------------------------------------------------------------------------------

// The factors of all elements of a span in one step.
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

// Does not touch `buffer` without momentum. It begins as 0, so the first step sets it to the
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
