// What happens once per step before any weight is touched: skip or not, the factor of all
// gradients, the powers of the betas, the next loss scale.
#pragma once

#include <cmath>

#include "fsdp/base/host_device.h"
#include "fsdp/optim/step_state.h"

namespace fsdp {

FSDP_HOST_DEVICE inline bool has_dynamic_scale(const StepRule& rule) {
  return rule.growth != 1.0 || rule.backoff != 1.0;
}

// What the loss is multiplied by from the next step on; this step's gradients have the old scale.
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

// Expects `squared_norm` (0 where nobody asks for the norm) and `learning_rate`; fills everything
// that the updates of this step read.
FSDP_HOST_DEVICE inline void begin_step(StepState& state, const StepRule& rule) {
  const double unscale = 1.0 / state.loss_scale;
  state.norm = sqrt(state.squared_norm) * unscale;
  // As torch's clip_grad_norm_: not above 1; a NaN stays one.
  const double clip = rule.max_norm / (state.norm + 1e-6);
  const bool clips = rule.max_norm > 0.0 && !(clip > 1.0);
  state.gradient_factor = static_cast<float>(clips ? unscale * clip : unscale);

  // x - x is 0 for finite numbers and NaN for the others.
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
