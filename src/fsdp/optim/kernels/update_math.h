// How a step begins, the update rules, and AdamW and SGD on one element, on hosts and devices
// alike.
#pragma once

#include <cmath>
#include <cstdint>

#include "fsdp/base/compiler.h"
#include "fsdp/base/integer.h"
#include "fsdp/optim/kernels/update_span.h"
#include "fsdp/optim/optimizer_options.h"
#include "fsdp/optim/step_state.h"

namespace fsdp {

// How a step begins, on the model's device, from the numbers that the last step left there; the
// same for all steps.
struct StepRule {
  double beta1 = 0.9;  // for optimizers that correct a bias
  double beta2 = 0.999;
  double max_norm = 0.0;         // gradients are clipped to this norm; 0: no clipping
  bool skips_nonfinite = false;  // a step with a NaN or Inf among the gradients changes nothing
  // Dynamic loss scaling: after a skipped step the scale is multiplied by `backoff`, after
  // `growth_interval` good ones by `growth`. Both 1: the scale is static.
  double growth = 1.0;
  double backoff = 1.0;
  int64_t growth_interval = 2000;
  double min_scale = 1.0;  // a model that is broken for good would drive the scale to 0
  double max_scale = 16777216.0;
};

// --- the beginning of a step ---------------------------------------------------------------------

// The decisions of a step before any weight is touched: skip or not, the factor of all gradients,
// the powers of the betas, the next loss scale.

FSDP_HOST_DEVICE inline bool has_dynamic_scale(const StepRule& rule) {
  return rule.growth != 1.0 || rule.backoff != 1.0;
}

// The loss scale of the next step; this step's gradients have the old one.
FSDP_HOST_DEVICE inline void advance_loss_scale(StepState& state, const StepRule& rule) {
  if (!has_dynamic_scale(rule)) return;
  if (state.skips != 0) {
    const double smaller = state.loss_scale * rule.backoff;
    state.loss_scale = smaller < rule.min_scale ? rule.min_scale : smaller;
    state.good_steps = 0;
  } else if (++state.good_steps >= rule.growth_interval) {
    const double larger = state.loss_scale * rule.growth;
    state.loss_scale = larger > rule.max_scale ? rule.max_scale : larger;
    state.good_steps = 0;
  }
}

// Expects `squared_norm` (0 if the norm is not measured) and `learning_rate`; fills everything that
// the updates of this step read.
FSDP_HOST_DEVICE inline void begin_step(StepState& state, const StepRule& rule) {
  const double unscale = 1.0 / state.loss_scale;
  state.norm = sqrt(state.squared_norm) * unscale;
  // Like torch's clip_grad_norm_: at most 1; a NaN stays NaN.
  const double clip = rule.max_norm / (state.norm + 1e-6);
  const bool clips = rule.max_norm > 0.0 && !(clip > 1.0);
  state.gradient_factor = static_cast<float>(clips ? unscale * clip : unscale);

  // x - x is 0 for finite numbers and NaN for others.
  const bool is_finite = state.squared_norm - state.squared_norm == 0.0;
  state.skips = !is_finite && (rule.skips_nonfinite || has_dynamic_scale(rule)) ? 1 : 0;
  if (state.skips != 0) {
    ++state.skipped;
  } else {
    ++state.step;
    state.beta1_power *= rule.beta1;
    state.beta2_power *= rule.beta2;
  }
  advance_loss_scale(state, rule);
}

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

// Takes products alone, so that hosts and devices have the same bits.
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
// The change by the new moments; `root` is that of the second one.
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

// --- random bits ---------------------------------------------------------------------------------

// They depend on a position and a step instead of a generator, so that any thread, shard or device
// draws the same ones.

// The use of the bits; each use has its own.
enum class RandomPurpose : uint32_t { kWeight = 1, kSecondMoment = 2 };

// One step's bits for one purpose and group, from position & ~0xFFFFFFFF on.
struct RandomKey {
  uint32_t first = 0;
  uint32_t second = 0;
};

FSDP_HOST_DEVICE inline RandomKey random_key(uint64_t seed, int64_t step, uint64_t group,
                                             RandomPurpose purpose, int64_t position) {
  uint64_t key = mixed_bits(seed + 0x9E3779B97F4A7C15ull);
  key = mixed_bits(key ^ static_cast<uint64_t>(step));
  key = mixed_bits(key ^ group);
  const auto high = static_cast<uint64_t>(position) >> 32;
  key = mixed_bits(key ^ (high << 8) ^ static_cast<uint64_t>(purpose));
  return {.first = static_cast<uint32_t>(key), .second = static_cast<uint32_t>(key >> 32)};
}

// 32 bits for a pair of elements: two rounds of multiply and shift, which vectorise, each after one
// half of the key.
FSDP_HOST_DEVICE inline uint32_t random_pair(RandomKey key, uint32_t pair) {
  uint32_t x = pair ^ key.first;
  x = (x ^ (x >> 16)) * 0x7FEB352Du;
  x = ((x ^ (x >> 15)) + key.second) * 0x846CA68Bu;
  return x ^ (x >> 16);
}

// 16 bits for the element at a position, whose upper half is in the key: the even element of a pair
// has the lower bits.
FSDP_HOST_DEVICE inline uint32_t random_bits(RandomKey key, uint32_t position) {
  const uint32_t pair = random_pair(key, position >> 1);
  return (position & 1u) != 0 ? pair >> 16 : pair & 0xFFFFu;
}

}  // namespace fsdp
