// How a step begins, before any weight is touched: on the model's device, from the numbers that the
// last step left there.
#pragma once

#include <cmath>
#include <cstdint>

#include "fsdp/base/compiler.h"
#include "fsdp/optim/step_state.h"

namespace fsdp {

// How a step begins; the same for all steps.
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

}  // namespace fsdp
